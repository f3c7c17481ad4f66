"""All messages of a rank, on its device or, where it has none, on its host."""

from __future__ import annotations

from shardwise.trace.activity import Activity
from shardwise.trace.sent import Sent
from shardwise.trace.sent_device import sent_on_device
from shardwise.trace.sent_host import sent_on_host


def sent(activity: Activity) -> Sent:
    """The messages, by start."""
    return sent_on_host(activity) if activity.on_host else sent_on_device(activity)
