"""Accelerators by name: peak speed, memory and links as their makers state them, dense (no sparsity), and what a device
costs to rent. A *device* is what the framework calls one: half of an MI250X, a whole TPU chip.

How much of a peak is reached is fitted to measurements: see `efficiency.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.run import Run
from shardwise.run.check import Broken
from shardwise.run.problems import Problem, UserError, nearest

# Dynamic power grows with clock times voltage squared, and voltage nearly with the clock, so the clock follows a cap's
# share of the full power to about the power 1/2.5. An H100 held to 500 of its 700 W is then 13 % slower; published
# training runs under that cap lost 10 to 15 %.
POWER_EXPONENT = 0.4

GB, GIB = 10**9, 2**30


@dataclass(frozen=True)
class Chip:
    """One accelerator device in the platform it is usually sold in. Speeds are per second, sizes in bytes."""

    name: str
    maker: str
    generation: str  # names the planner's fitted constants
    peak: dict[str, float] = field(hash=False)  # FLOP/s by dtype, dense
    memory: int
    hbm: float
    units: int  # multiprocessors, compute units, matrix units or cores: tiles are distributed over them
    l2: int
    power: float  # W
    devices_per_node: int
    domain: int  # devices joined by the fast link
    intra: float  # bytes/s a device and direction on the fast link
    inter: float  # bytes/s a device and direction between machines
    price: float  # US dollars for a device and hour; 0: no public price known
    driver_names: tuple[str, ...] = ()
    fabric: str = "rail"
    clock: float = 1.0  # tensor speed under a power cap, relative to none
    profile: Any = field(default=None, hash=False, compare=False)  # a measured `profile.Profile`, or None

    def altered(self, power_w: float = 0, hbm_gbs: float = 0) -> Chip:
        """This chip under a power cap (W), or with another memory bandwidth (GB/s); 0 leaves a value as it is."""
        clock = min(1.0, power_w / self.power) ** POWER_EXPONENT if power_w else self.clock
        return replace(self, clock=clock, hbm=hbm_gbs * GB if hbm_gbs else self.hbm)

    def speed(self, dtype: str) -> float:
        """Peak FLOP/s of GEMMs in `dtype`, under the power cap if there is one."""
        if dtype not in self.peak:
            raise UserError(Problem(f"{self.name} has no {dtype} GEMMs; it has {', '.join(self.peak)}"))
        return self.peak[dtype] * self.clock


# Bytes of an element, for the traffic of a kernel. tf32 is stored as float32.
ITEM_BYTES = {
    "float64": 8.0,
    "float32": 4.0,
    "tf32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5625,  # four bits, and a byte of scale for each sixteen
}


def _tera(**speeds: float) -> dict[str, float]:
    """Peaks in FLOP/s from TFLOP/s. float32 is the rate without tensor cores, which PyTorch uses unless TF32 is enabled;
    `half` is both 16-bit formats."""
    half = speeds.pop("half", 0.0)
    named = dict(speeds, float16=half, bfloat16=half) if half else speeds
    return {name: speed * 1e12 for name, speed in named.items()}


# Memory: what the maker calls 32, 40, 80 or 192 GB is that many GiB, as is the 141 of an H200, the 180 of a B200 and the
# 186 of a GB200; the 288 GB of a B300 and a GB300 are decimal (the driver shows 268 GiB on a B300).
# Links: a device's bandwidth in one direction, on the fast link as the maker states it, and between machines that of the
# network cards in the maker's own platform (DGX-2: eight cards of 100 Gb/s for sixteen V100; DGX A100 to B200: a card of
# 200 or 400 Gb/s for each device; DGX B300: of 800).
# Prices: public on-demand prices of 2025 in machines of eight: Lambda (V100, A100, H100, B200), RunPod (H200 and the PCIe
# cards), CoreWeave (GB200), Vultr (MI300X and later), Google Cloud (TPU). A800 and H800 have the price of the chip they
# were cut from, B300 and GB300 a fifth above B200 and GB200: no list has them.
_V100 = Chip(
    name="v100-sxm-32g",
    maker="NVIDIA",
    generation="volta",
    peak=_tera(float64=7.8, float32=15.7, float16=125.0),
    memory=32 * GIB,
    hbm=900e9,
    units=80,
    l2=6 * 2**20,
    power=300,
    devices_per_node=16,
    domain=16,
    intra=150e9,
    inter=6.25e9,
    price=0.55,
    driver_names=("V100",),
)
_A100 = Chip(
    name="a100-sxm-80g",
    maker="NVIDIA",
    generation="ampere",
    peak=_tera(float64=19.5, float32=19.5, tf32=156, half=312, int8=624),
    memory=80 * GIB,
    hbm=2.039e12,
    units=108,
    l2=40 * 2**20,
    power=400,
    devices_per_node=8,
    domain=8,
    intra=300e9,
    inter=25e9,
    price=1.79,
    driver_names=("A100",),
)
_H100 = Chip(
    name="h100-sxm",
    maker="NVIDIA",
    generation="hopper",
    peak=_tera(float64=66.9, float32=66.9, tf32=494.7, half=989.4, fp8=1978.9, int8=1978.9),
    memory=80 * GIB,
    hbm=3.35e12,
    units=132,
    l2=50 * 2**20,
    power=700,
    devices_per_node=8,
    domain=8,
    intra=450e9,
    inter=50e9,
    price=2.99,
    driver_names=("H100",),
)
_B200 = Chip(
    name="b200",
    maker="NVIDIA",
    generation="blackwell",
    peak=_tera(float64=37, float32=75, tf32=1125, half=2250, fp8=4500, int8=4500, fp4=9000),
    memory=180 * GIB,
    hbm=8e12,
    units=148,
    l2=126 * 2**20,
    power=1000,
    devices_per_node=8,
    domain=8,
    intra=900e9,
    inter=50e9,
    price=4.99,
    driver_names=("B200",),
)
_GB200 = replace(
    _B200,
    name="gb200",
    peak=_tera(float64=40, float32=80, tf32=1250, half=2500, fp8=5000, int8=5000, fp4=10000),
    memory=186 * GIB,
    units=152,
    power=1200,
    devices_per_node=4,
    domain=72,
    price=10.50,
    driver_names=("GB200",),
)
_MI300X = Chip(
    name="mi300x",
    maker="AMD",
    generation="cdna3",
    peak=_tera(float64=163.4, float32=163.4, tf32=653.7, half=1307.4, fp8=2614.9, int8=2614.9),
    memory=192 * GIB,
    hbm=5.3e12,
    units=304,
    l2=32 * 2**20,
    power=750,
    devices_per_node=8,
    domain=8,
    intra=448e9,
    inter=50e9,
    price=1.85,
    driver_names=("MI300X",),
)
_TPU_V4 = Chip(
    name="tpu-v4",
    maker="Google",
    generation="tpu",
    # A float32 GEMM is made of bfloat16 passes; six of them keep full precision.
    peak=_tera(float32=275 / 6, bfloat16=275, int8=275),
    memory=32 * GIB,
    hbm=1.228e12,
    units=8,
    l2=160 * 2**20,
    power=192,
    devices_per_node=4,
    domain=4096,
    intra=300e9,
    inter=6.25e9,
    price=3.22,
    fabric="torus",
)


def _cpu() -> Chip:
    """This machine, by a modest guess: 50 GFLOP/s in float32 and 5 GB/s of memory a core. A measured profile is better."""
    cores = os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory = 8 * GIB
    # Without instructions of their own, 16-bit formats are widened first: no faster than float32.
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


# A driver's name is looked up in this order, so the more exact name comes first.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _V100,
        replace(
            _A100,
            name="a100-sxm-40g",
            memory=40 * GIB,
            hbm=1.555e12,
            price=1.29,
            driver_names=("A100-SXM4-40GB", "A100-PCIE-40GB"),
        ),
        replace(
            _A100,
            name="a100-pcie-80g",
            hbm=1.935e12,
            power=300,
            intra=32e9,
            price=1.39,
            driver_names=("A100 80GB PCIe", "A100-PCIE-80GB"),
        ),
        _A100,
        replace(_A100, name="a800-sxm-80g", intra=200e9, driver_names=("A800",)),
        replace(
            _H100,
            name="h100-pcie",
            peak=_tera(float64=51.2, float32=51.2, tf32=378, half=756, fp8=1513, int8=1513),
            hbm=2.039e12,
            units=114,
            power=350,
            intra=64e9,
            inter=25e9,
            price=2.39,
            driver_names=("H100 PCIe",),
        ),
        _H100,
        replace(_H100, name="h800-sxm", peak=dict(_H100.peak, float64=1e12), intra=200e9, driver_names=("H800",)),
        replace(_H100, name="h200-sxm", memory=141 * GIB, hbm=4.8e12, price=3.59, driver_names=("H200",)),
        _GB200,
        replace(
            _GB200,
            name="gb300",
            peak=_tera(float64=1.3, float32=80, tf32=1250, half=2500, fp8=5000, fp4=15000),
            memory=288 * GB,
            power=1400,
            inter=100e9,
            price=12.60,
            driver_names=("GB300",),
        ),
        _B200,
        replace(
            _B200,
            name="b300",
            peak=_tera(float64=1.2, float32=75, tf32=1125, half=2250, fp8=4500, fp4=13500),
            memory=288 * GB,
            power=1100,
            inter=100e9,
            price=5.99,
            driver_names=("B300",),
        ),
        # One of the two dies of an MI250X: the driver shows each as a device.
        replace(
            _MI300X,
            name="mi250x",
            generation="cdna2",
            peak=_tera(float64=47.9, float32=47.9, half=191.5, int8=191.5),
            memory=64 * GIB,
            hbm=1.6384e12,
            units=110,
            l2=8 * 2**20,
            power=280,
            intra=100e9,
            inter=12.5e9,
            price=0.0,
            driver_names=("MI250X",),
        ),
        _MI300X,
        replace(_MI300X, name="mi325x", memory=256 * GIB, hbm=6e12, power=1000, price=2.00, driver_names=("MI325X",)),
        replace(
            _MI300X,
            name="mi355x",
            peak=_tera(float64=78.6, float32=157.3, half=2516.6, fp8=5033.2, int8=5033.2, fp4=10066.3),
            memory=288 * GIB,
            hbm=8e12,
            units=256,
            power=1400,
            intra=537.6e9,
            price=2.59,
            driver_names=("MI355X",),
        ),
        replace(
            _TPU_V4,
            name="tpu-v3",
            peak=_tera(float32=123 / 6, bfloat16=123),
            hbm=900e9,
            units=4,
            l2=32 * 2**20,
            power=220,
            domain=1024,
            intra=280e9,
            price=2.00,
        ),
        _TPU_V4,
        replace(
            _TPU_V4,
            name="tpu-v5p",
            peak=_tera(float32=459 / 6, bfloat16=459, int8=918),
            memory=95 * GIB,
            hbm=2.765e12,
            power=350,
            domain=8960,
            intra=600e9,
            price=4.20,
        ),
        _cpu(),
    )
}

ALIASES = {
    "v100": "v100-sxm-32g",
    "a100": "a100-sxm-80g",
    "a100-40": "a100-sxm-40g",
    "a100-80": "a100-sxm-80g",
    "a100-40g": "a100-sxm-40g",
    "a100-80g": "a100-sxm-80g",
    "a100-pcie": "a100-pcie-80g",
    "a800": "a800-sxm-80g",
    "h100": "h100-sxm",
    "h800": "h800-sxm",
    "h200": "h200-sxm",
    "v3": "tpu-v3",
    "v4": "tpu-v4",
    "v5p": "tpu-v5p",
}


def unknown_chip(run: Run) -> Iterator[Broken]:
    """The rule that a run's chip is in the catalogue."""
    try:
        find_chip(run.cluster.chip or "cpu")
    except UserError as problem:
        yield Broken("cluster.chip", (), problem.problems[0].message)


def find_chip(name: str) -> Chip:
    """The chip called `name`, by its catalogue name or an alias."""
    wanted = name.strip().lower().replace("_", "-")
    wanted = ALIASES.get(wanted, wanted)
    if wanted not in CHIPS:
        hint = nearest(wanted, [*CHIPS, *ALIASES])
        raise UserError(Problem(f'no chip is called "{name}"{hint or "; known: " + ", ".join(CHIPS)}'))
    return CHIPS[wanted]


def chip_of_driver_name(name: str) -> Chip | None:
    """The chip a driver calls `name`, or None when the catalogue does not know it."""
    return next((chip for chip in CHIPS.values() if any(part in name for part in chip.driver_names)), None)
