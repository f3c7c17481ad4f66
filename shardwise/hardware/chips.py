"""Accelerators by name, from the catalogue `chips.toml`, or from a user's own file in the same format: peak speed, memory, links
and price of one device.

How much of a peak is reached is fitted to measurements: see `efficiency.py`.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from shardwise.run import Run
from shardwise.run.dtypes import DTYPE_BYTES
from shardwise.run.problems import Problem, UserError, nearest, unreadable
from shardwise.run.rules.rule import Broken

# Dynamic power grows with clock times voltage squared, and voltage nearly with the clock, so the clock falls with about
# the 1/2.5th power of the cap's share of full power. An H100 capped at 500 of its 700 W is then 13 % slower; published
# training runs under that cap lost 10 to 15 %.
POWER_EXPONENT = 0.4

GB, GIB = 10**9, 2**30

Fabric = Literal["rail", "fat-tree", "ethernet", "torus"]
FABRICS: tuple[Fabric, ...] = ("rail", "fat-tree", "ethernet", "torus")


@dataclass(frozen=True)
class Chip:
    """One accelerator device in the platform it is usually sold in. Speeds are per second, sizes in bytes."""

    name: str
    maker: str
    generation: str  # names the planner's fitted constants
    peak: dict[str, float] = field(hash=False)  # FLOP/s by dtype, dense
    memory: int
    hbm: float
    units: int  # SMs, compute units, matrix units or cores: tiles are distributed over them
    l2: int
    power: float  # W
    devices_per_node: int
    domain: int  # devices joined by the fast link
    intra: float  # bytes/s per device and direction on the fast link
    inter: float  # bytes/s per device and direction between machines
    price: float  # US dollars per device and hour; 0: no public price known
    driver_names: tuple[str, ...] = ()
    fabric: str = "rail"
    clock: float = 1.0  # tensor speed under a power cap, relative to none
    lender: str = ""  # the chip of the catalogue whose curves a user's own chip borrows
    profile: Any = field(default=None, hash=False, compare=False)  # a measured `profile.Profile`, or None

    def altered(self, power_w: float = 0, hbm_gbs: float = 0) -> Chip:
        """This chip under a power cap (W), or with another memory bandwidth (GB/s); 0 leaves a value as it is."""
        clock = min(1.0, power_w / self.power) ** POWER_EXPONENT if power_w else self.clock
        return replace(self, clock=clock, hbm=hbm_gbs * GB if hbm_gbs else self.hbm)

    def speed(self, dtype: str) -> float:
        """Peak FLOP/s of GEMMs in `dtype`, under the power cap if one is set."""
        if dtype not in self.peak:
            raise UserError(Problem(f"{self.name} has no {dtype} GEMMs; it has {', '.join(self.peak)}"))
        return self.peak[dtype] * self.clock


GEMM_DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16", "fp8", "int8")
ITEM_BYTES = {dtype: float(DTYPE_BYTES[dtype]) for dtype in GEMM_DTYPES} | {"fp4": 0.5625}
"""Bytes of an element of a GEMM; fp4: four bits, and one byte of scale per sixteen elements."""


def _tera(**speeds: float) -> dict[str, float]:
    """Peaks in FLOP/s from TFLOP/s; `half` is both 16-bit formats."""
    half = speeds.pop("half", 0.0)
    named = dict(speeds, float16=half, bfloat16=half) if half else speeds
    return {name: speed * 1e12 for name, speed in named.items()}


def _cpu() -> Chip:
    """This machine, by a modest guess: 50 GFLOP/s in float32 and 5 GB/s of memory per core. A measured profile is better."""
    cores = os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory = 8 * GIB
    # CPUs without 16-bit instructions convert to float32 first, so 16-bit formats are no faster.
    tera = 0.05 * cores
    return Chip(
        name="cpu",
        maker="this machine",
        generation="cpu",
        peak=_tera(float64=tera / 2, float32=tera, half=tera),
        memory=memory,
        hbm=5e9 * cores,
        units=cores,
        l2=2**20 * cores,
        power=15.0 * cores,
        devices_per_node=cores,
        domain=cores,
        intra=2e9,
        inter=1e9,
        price=0.0,
        fabric="ethernet",
    )


# Keys of a chip in a file: the field and its unit. The unit of an integer field is an `int`.
_NUMBERS: dict[str, tuple[str, float]] = {
    "memory_gib": ("memory", GIB),
    "memory_gb": ("memory", GB),
    "hbm_gbs": ("hbm", 1e9),
    "intra_gbs": ("intra", 1e9),
    "inter_gbs": ("inter", 1e9),
    "units": ("units", 1),
    "l2_mib": ("l2", 2**20),
    "power_w": ("power", 1.0),
    "devices_per_node": ("devices_per_node", 1),
    "domain": ("domain", 1),
    "price": ("price", 1.0),
}
_TEXTS = ("maker", "generation", "fabric")
_LISTS = ("driver_names", "aliases")
_KEYS = ("like", "tflops", *_NUMBERS, *_TEXTS, *_LISTS)
_NEEDED = {"peak": "tflops", "memory": "memory_gib", "hbm": "hbm_gbs", "intra": "intra_gbs", "inter": "inter_gbs"}


def _read_keys(values: Mapping[str, Any], problems: list[Problem], where: str) -> dict[str, Any]:
    """The fields of `Chip` in a chip's table; mistakes are appended to `problems`."""
    found: dict[str, Any] = {}

    def wrong(name: str, what: str) -> None:
        problems.append(Problem(what, name, where))

    for name, value in values.items():
        if name not in _KEYS:
            wrong(name, f"there is no such key{nearest(name, _KEYS) or '; known: ' + ', '.join(_KEYS)}")
        elif name in _NUMBERS:
            attribute, unit = _NUMBERS[name]
            whole = isinstance(unit, int) and unit == 1
            least = "at least 0" if name == "price" else "at least 1" if whole else "above 0"
            if (
                not _is_number(value)
                or value < 0
                or (value == 0 and name != "price")
                or (whole and value != int(value))
            ):
                wrong(name, f"{value!r} is not a {'whole ' * whole}number {least}")
            elif attribute in found:
                wrong(name, "the memory is given twice; use memory_gib or memory_gb")
            else:
                found[attribute] = int(value * unit) if isinstance(unit, int) else float(value * unit)
        elif name == "tflops":
            found["peak"] = _read_peaks(value, wrong)
        elif name in _LISTS:
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                wrong(name, "is not a list of names")
            elif name == "driver_names":
                found[name] = tuple(value)
        elif not isinstance(value, str):
            wrong(name, f"{value!r} is not text")
        elif name == "fabric" and value not in FABRICS:
            wrong(name, f'"{value}" is not one of {", ".join(FABRICS)}')
        elif name in _TEXTS:
            found[name] = value
    return found


def _read_peaks(value: Any, wrong: Callable[[str, str], None]) -> dict[str, float]:
    dtypes = (*ITEM_BYTES, "half")
    if not isinstance(value, dict) or not value:
        wrong("tflops", "is not a table of TFLOP/s by dtype, such as { float32 = 60, half = 900 }")
        return {}
    for dtype, speed in value.items():
        if dtype not in dtypes:
            wrong(f"tflops.{dtype}", f"is not one of {', '.join(dtypes)}{nearest(dtype, dtypes)}")
        elif not _is_number(speed) or speed <= 0:
            wrong(f"tflops.{dtype}", f"{speed!r} is not a number above 0")
    good = {dtype: speed for dtype, speed in value.items() if dtype in dtypes and _is_number(speed)}
    return _tera(**good)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _like(base: Chip, name: str, found: Mapping[str, Any]) -> Chip:
    """A copy of `base` with these fields replaced. A fast link that spans exactly one machine does so at the new size too."""
    own = {"driver_names": (), "name": name, **found}
    if "devices_per_node" in own and base.domain == base.devices_per_node:
        own.setdefault("domain", own["devices_per_node"])
    return replace(base, **own)


def _catalogue() -> tuple[dict[str, Chip], dict[str, str]]:
    """The chips of `chips.toml` in file order, then this machine; and the aliases of their names."""
    path = Path(__file__).with_name("chips.toml")
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    problems: list[Problem] = []

    @cache
    def made(name: str) -> Chip:
        values = tables[name]
        found = _read_keys(values, problems, f"{path}: {name}")
        return _like(made(values["like"]), name, found) if "like" in values else Chip(name=name, **found)

    chips = {name: made(name) for name in tables}
    if problems:
        raise UserError(*problems)
    aliases = {alias: name for name, values in tables.items() for alias in values.get("aliases", ())}
    return {**chips, "cpu": _cpu()}, aliases


CHIPS, ALIASES = _catalogue()


def unknown_chip(run: Run) -> Iterator[Broken]:
    """The rule that a run's chip is in the catalogue, or in a valid file."""
    try:
        find_chip(run.cluster.chip or "cpu")
    except UserError as error:
        for problem in error.problems:
            yield Broken("cluster.chip", (), str(problem))


def find_chip(name: str) -> Chip:
    """The chip called `name`, by its catalogue name or an alias; or the chip that a TOML file describes."""
    if name.strip().lower().endswith(".toml"):
        return _own_chip(Path(name.strip()))
    return _known_chip(name)


def _known_chip(name: str) -> Chip:
    wanted = re.sub(r"[\s_]+", "-", name.strip().lower())
    wanted = re.sub(r"^((nvidia|geforce|tesla|amd|instinct|google)-)+", "", wanted)
    wanted = re.sub(r"(\d)gb\b", r"\1g", wanted)  # the catalogue writes 80gb as 80g
    wanted = ALIASES.get(wanted, wanted)
    if wanted not in CHIPS:
        hint = nearest(wanted, [*CHIPS, *ALIASES]) or "; known: " + ", ".join(CHIPS) + "."
        raise UserError(Problem(f'no chip is called "{name}"{hint} `shardwise config --chips` lists them'))
    return CHIPS[wanted]


def _own_chip(path: Path) -> Chip:
    """The chip of a user's file: the same keys as in the catalogue, at top level or below the chip's name in brackets."""
    where = str(path)
    try:
        values = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as e:
        raise unreadable(e, where=where) from None
    except (ValueError, RecursionError) as e:  # Python reads no integer of more than 4,300 digits
        raise UserError(Problem(f"is not valid TOML: {e}", where=where)) from None
    name, problems = path.stem, list[Problem]()
    if len(values) == 1 and isinstance(table := next(iter(values.values())), dict) and "tflops" not in values:
        [name], values = values, table
    found = _read_keys(values, problems, where)
    if name in CHIPS:
        problems.append(Problem(f'"{name}" is the name of a chip in the catalogue; give the file another', where=where))
    base = None
    if isinstance(values.get("like", ""), str) and values.get("like"):
        try:
            base = _known_chip(values["like"])
        except UserError as error:
            problems += [Problem(p.message, "like", where) for p in error.problems]
    elif "like" not in values:
        missing = [key for attribute, key in _NEEDED.items() if attribute not in found and key not in values]
        problems += [
            Problem("is missing; give it, or the name of a known chip as `like`", key, where) for key in missing
        ]
    if problems:
        raise UserError(*problems)
    if base is None:
        close = _nearest_chip(found)
        usual: dict[str, Any] = dict(maker="", generation=name, devices_per_node=8, domain=8, price=0.0, fabric="rail")
        base = replace(close, **usual)
    return replace(_like(base, name, found), lender=base.name)


def _nearest_chip(found: Mapping[str, Any]) -> Chip:
    """The accelerator of the catalogue whose 16-bit speed and memory bandwidth are nearest, by ratio: of the same generation if
    there is one, and with a torus only if this chip has one."""

    def fast(peaks: Mapping[str, float]) -> float:
        return max(peaks.get("bfloat16", 0.0), peaks.get("float16", 0.0)) or max(peaks.values())

    torus = found.get("fabric") == "torus"
    known = [chip for chip in CHIPS.values() if chip.name != "cpu" and (chip.fabric == "torus") == torus]
    same = [chip for chip in known if chip.generation == found.get("generation")]
    peak, hbm = fast(found["peak"]), found["hbm"]
    return min(same or known, key=lambda c: abs(math.log(fast(c.peak) / peak)) + abs(math.log(c.hbm / hbm)))


def chip_of_driver_name(name: str) -> Chip | None:
    """The chip whose driver name is `name`, or None if the catalogue does not have it."""

    def called(part: str) -> bool:
        # An L40 is not an L4, and a GH200 not an H200.
        return re.search(r"(?<![A-Za-z])" + re.escape(part) + r"(?!\d)", name) is not None

    return next((chip for chip in CHIPS.values() if any(map(called, chip.driver_names))), None)
