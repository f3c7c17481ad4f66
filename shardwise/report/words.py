"""Formats numbers with three significant digits and a unit, for both terminal and page; a number that is not finite is a dash."""

from __future__ import annotations

import math

DASH = "–"
_DECIMAL = ("", "k", "M", "B", "T")  # as parameters and tokens are counted
_METRIC = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(amount: float) -> str:
    """Bytes with a binary unit: 71.2 GiB, 640 KiB, 12 B. Below 1 KiB they are rounded to full bytes, which a mean may not be."""
    return _scaled(round(amount) if abs(amount) < 1024 else amount, 1024, _BINARY)


def gib(amount: float) -> str:
    """Bytes in GiB without the unit, for columns that share it: 71.20."""
    return f"{amount / 2**30:,.2f}" if math.isfinite(amount) else DASH


def seconds(amount: float) -> str:
    """A duration: 820 ns, 12.0 µs, 4.31 ms, 2.50 s, 14.0 min, 31.0 h, 12.5 days."""
    if not math.isfinite(amount):
        return DASH
    if amount < 0:
        return "-" + seconds(-amount)
    # A value that rounds up to the next unit is printed in it: 999.6 ms is 1.00 s.
    for limit, unit, name in ((9.995e-7, 1e-9, "ns"), (9.995e-4, 1e-6, "µs"), (0.9995, 1e-3, "ms"), (119.95, 1, "s"),
                              (119.95 * 60, 60, "min"), (47.95 * 3600, 3600, "h")):  # fmt: skip
        if amount < limit:
            return f"{digits(amount / unit)} {name}" if amount else "0 s"
    return f"{digits(amount / 86400)} days"


def clock(amount: float) -> str:
    """A duration to the second: 42s, 3m07s, 5h12m, 3d04h."""
    s = max(0, round(amount))
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600:02d}h"


def count(amount: float) -> str:
    """A count: 12, 16,384, 131 k, 1.25 M, 405 B (billions), 15.0 T. Whole numbers stay exact below 100,000."""
    if math.isfinite(amount) and abs(amount) < 100_000 and amount == int(amount):
        return f"{int(amount):,}"
    return _scaled(amount, 1000, _DECIMAL).rstrip()


def flops(amount: float, unit: str = "FLOPs") -> str:
    """FLOPs, or a rate with `unit="FLOP/s"`: 412 TFLOP/s."""
    return _scaled(amount, 1000, tuple(prefix + unit for prefix in _METRIC))


def rate(amount: float, unit: str) -> str:
    """A rate: 1.25 M tokens/s; bytes as 340 GB/s, since links are specified in decimal gigabytes."""
    if unit == "B":
        return _scaled(amount, 1000, tuple(prefix + "B/s" for prefix in _METRIC))
    return f"{count(amount)} {unit}/s"


def percent(share: float) -> str:
    """A share: 43.2%, 100%; small but not zero is <0.1%."""
    if not math.isfinite(share * 100):
        return DASH
    if 0 < share < 0.0005:
        return "<0.1%"
    text = f"{share * 100:.1f}"
    return f"{text.removesuffix('.0') if text in ('0.0', '100.0') else text}%"


def change(share: float) -> str:
    """A relative difference: +3.2%, -0.5%, 0%; relative to zero it is "new"."""
    if math.isnan(share):
        return DASH
    if math.isinf(share):
        return "new"
    if share == 0:
        return "0%"
    if abs(share) < 5e-6:
        return "<0.001%" if share > 0 else "-<0.001%"
    if abs(share) < 0.0005:
        return f"{share * 100:+.3f}%"
    return f"{share * 100:+,.1f}%" if abs(share) < 9.995 else f"×{share + 1:,.0f}"


def slower(share: float) -> str:
    """The relative difference of two times as text: 3.2% slower, 10.0% faster, 5.6 times as long."""
    if not math.isfinite(share):
        return DASH
    if share >= 1:
        return f"{digits(1 + share)} times as long"
    return f"{abs(share) * 100:.1f}% {'slower' if share > 0 else 'faster'}"


def money(amount: float, currency: str = "$") -> str:
    """A price: $3.20, $12,340, $1.25 M."""
    if not math.isfinite(amount):
        return DASH
    if amount < 0:
        return "-" + money(-amount, currency)
    if amount < 99.995:
        return f"{currency}{amount:.2f}"
    return f"{currency}{amount:,.0f}" if amount < 999_999.5 else currency + count(amount)


def price(amount: float | None) -> str:
    """A price; None or 0 means that none is known."""
    return money(amount) if amount else DASH


def quantity(account: str, name: str, value: float) -> str:
    """A value of `ledger.quantities` in its unit."""
    if account == "time":
        return seconds(value)
    if account == "memory" or name.startswith("bytes "):
        return size(value)
    return flops(value) if name.startswith("flops ") else count(value)


def shortened(text: str, most: int) -> str:
    """A text of at most `most` characters. The middle is left out, since a name begins with its kind and ends with its details."""
    if len(text) <= most:
        return text
    tail = max(0, most - 1) * 2 // 5
    return text[: max(0, most - 1 - tail)] + "…" + (text[-tail:] if tail else "")


def digits(amount: float) -> str:
    """Three significant digits: 1.23, 12.3, 123, 1,234."""
    if not math.isfinite(amount):
        return DASH
    magnitude = abs(amount)
    return f"{amount:,.{2 if magnitude < 9.995 else 1 if magnitude < 99.95 else 0}f}"


def _scaled(amount: float, base: int, units: tuple[str, ...]) -> str:
    if not math.isfinite(amount):
        return DASH
    if amount < 0:
        return "-" + _scaled(-amount, base, units)
    step = 0
    # 999.5 of a unit already prints as 1,000, which is 1.00 of the next unit; so does 1,023.5 KiB.
    while step < len(units) - 1 and amount >= base - 0.5:
        amount /= base
        step += 1
    exact = step == 0 and amount == round(amount)
    return f"{int(amount) if exact else digits(amount)} {units[step]}"
