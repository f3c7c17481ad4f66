"""All messages of a rank, on its device or, where it has none, on its host."""

from __future__ import annotations

from shardwise.trace.sending.sent import Sent
from shardwise.trace.sending.sent_device import sent_on_device
from shardwise.trace.sending.sent_host import sent_on_host
from shardwise.trace.spans.activity import Activity


def sent(activity: Activity) -> Sent:
    """The messages, by start."""
    return sent_on_host(activity) if activity.on_host else sent_on_device(activity)
