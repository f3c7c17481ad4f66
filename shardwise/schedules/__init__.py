"""Pipeline schedules as lists of actions: made by name and timed, without torch."""

from shardwise.schedules.actions import (
    KINDS,
    PASSES,
    Action,
    Kind,
    Message,
    Schedule,
    message_of,
    messages_to,
    peak_activations,
)
from shardwise.schedules.bpipe import evictions
from shardwise.schedules.make import SCHEDULES, cached_schedule, fewer_rounds, legal, make_schedule, rounds_to_play
from shardwise.schedules.one_forward_one_backward import version_of, versions_kept
from shardwise.schedules.stages import split_layers
from shardwise.schedules.timing import Cost, Deadlock, Timing, play, time

__all__ = [
    "KINDS",
    "PASSES",
    "SCHEDULES",
    "Action",
    "Cost",
    "Deadlock",
    "Kind",
    "Message",
    "Schedule",
    "Timing",
    "cached_schedule",
    "evictions",
    "fewer_rounds",
    "legal",
    "make_schedule",
    "message_of",
    "messages_to",
    "peak_activations",
    "play",
    "rounds_to_play",
    "split_layers",
    "time",
    "version_of",
    "versions_kept",
]
