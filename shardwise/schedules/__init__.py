"""Pipeline schedules as lists of actions: made, checked, timed and drawn. Pure Python; imports no array library."""

from shardwise.schedules.actions import KINDS, Action, Kind, Message, Schedule, message_of, transfers
from shardwise.schedules.check import Report, check
from shardwise.schedules.draw import draw
from shardwise.schedules.make import SCHEDULES, SPLIT_BACKWARD, legal, make_schedule, usual_chunks
from shardwise.schedules.memory import held, high_water
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
    "Report",
    "Schedule",
    "Stuck",
    "Timing",
    "check",
    "draw",
    "held",
    "high_water",
    "legal",
    "make_schedule",
    "message_of",
    "play",
    "split_layers",
    "time",
    "transfers",
    "usual_chunks",
]
