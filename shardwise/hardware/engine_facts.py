"""Measured steps of the serving engine for a chip: from the user's own profile, or from one that comes with the package
(`serving/`, one file per chip, as `shardwise bench --serve` writes it).

A chip without measurements borrows those of another: points are used as factors on the cost model, so they scale with its peaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shardwise.hardware.chips import CHIPS, Chip
from shardwise.hardware.profile import Profile, load_profile

FOLDER = Path(__file__).with_name("serving")
LENDERS = {"cpu": "cpu"}
"""The chip whose facts a chip without its own borrows, where it is not `LENDER`."""
LENDER = "h200-sxm"
UNKNOWN = 0.25
"""Relative error of plans that were never compared with a measured load."""


@dataclass(frozen=True)
class EngineFacts:
    """Measured steps, and the chip they were measured on."""

    profile: Profile
    chip: Chip
    own: bool
    """Whether this is the chip that is planned for."""

    @property
    def error(self) -> float:
        """The expected relative error of a plan based on these facts."""
        return (self.profile.serve_error or UNKNOWN) if self.own else max(self.profile.serve_error, UNKNOWN)

    @property
    def origin(self) -> str:
        """Where the facts come from, for people."""
        day = self.profile.date.partition("T")[0]
        whose = "" if self.own else "borrowed, "
        return f"{whose}measured on {self.profile.machine}, torch {self.profile.torch.partition('+')[0]}, {day}"


def engine_facts(chip: Chip) -> EngineFacts:
    """The facts for a chip: from its profile, from the package, or borrowed from another chip."""
    if chip.profile is not None and chip.profile.decode:
        return EngineFacts(chip.profile, chip, True)
    name = next((each for each in (chip.name, chip.lender) if _measured(each)), LENDERS.get(chip.name, LENDER))
    return EngineFacts(_shipped(name), CHIPS[name], name == chip.name)


def _measured(name: str) -> bool:
    return bool(name) and (FOLDER / f"{name}.json").is_file()


@cache
def _shipped(name: str) -> Profile:
    return load_profile(FOLDER / f"{name}.json")
