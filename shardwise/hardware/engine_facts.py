"""What was measured of the serving engine's steps, for a chip: by the user's own profile, or by one that comes with the package
(`serving/`, a file for each chip, as `shardwise bench --serve` writes them).

A chip that no one has measured borrows: points are read as shares of what the cost model says, so they scale with its peaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shardwise.hardware.chips import CHIPS, Chip
from shardwise.hardware.profile import Profile, load_profile

FOLDER = Path(__file__).with_name("serving")
LENDERS = {"cpu": "cpu"}
"""Whose facts a chip without its own has, where it is not `LENDER`."""
LENDER = "h200-sxm"
UNKNOWN = 0.25
"""How far plans may be off where nobody has held them against a measured load, as a share."""


@dataclass(frozen=True)
class EngineFacts:
    """Measured steps, and the chip they were measured on."""

    profile: Profile
    chip: Chip
    own: bool
    """Whether that is the chip which is planned."""

    @property
    def error(self) -> float:
        """How far a plan made of these facts may be off, as a share."""
        return (self.profile.serve_error or UNKNOWN) if self.own else max(self.profile.serve_error, UNKNOWN)

    @property
    def origin(self) -> str:
        """Where they are from, for people."""
        day = self.profile.date.partition("T")[0]
        whose = "" if self.own else "borrowed, "
        return f"{whose}measured on {self.profile.machine}, torch {self.profile.torch.partition('+')[0]}, {day}"


def engine_facts(chip: Chip) -> EngineFacts:
    """The facts for a chip: its profile's, the catalogue's, or those of the chip that lends."""
    if chip.profile is not None and chip.profile.decode:
        return EngineFacts(chip.profile, chip, True)
    name = next((each for each in (chip.name, chip.lender) if _measured(each)), LENDERS.get(chip.name, LENDER))
    return EngineFacts(_shipped(name), CHIPS[name], name == chip.name)


def _measured(name: str) -> bool:
    return bool(name) and (FOLDER / f"{name}.json").is_file()


@cache
def _shipped(name: str) -> Profile:
    return load_profile(FOLDER / f"{name}.json")
