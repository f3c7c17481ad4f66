"""Pipeline schedules as lists of actions: made by name and timed. Pure Python; imports no array library."""

from shardwise.schedules.actions import KINDS, Action, Kind, Message, Schedule, high_water, message_of, transfers
from shardwise.schedules.make import (
    SCHEDULES,
    SPLIT_BACKWARD,
    cached_schedule,
    fewer_rounds,
    legal,
    make_schedule,
    rounds_to_play,
)
from shardwise.schedules.stages import split_layers
from shardwise.schedules.timing import Cost, Stuck, Timing, play, time

__all__ = [
    "KINDS",
    "SCHEDULES",
    "SPLIT_BACKWARD",
    "Action",
    "Cost",
    "Kind",
    "Message",
    "Schedule",
    "Stuck",
    "Timing",
    "cached_schedule",
    "fewer_rounds",
    "high_water",
    "legal",
    "make_schedule",
    "message_of",
    "play",
    "rounds_to_play",
    "split_layers",
    "time",
    "transfers",
]
