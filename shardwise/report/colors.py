"""One colour for each axis, category of time, owner of memory and pass, for both light and dark backgrounds.

Colours that meet in one chart are distinct in OKLab under normal sight, protanopia and deuteranopia, each with a contrast of
1.9 or more to both backgrounds; the tests measure it. No chart relies on colour alone: bars have names, cells have letters.
"""

from __future__ import annotations

from shardwise.ledger import Span
from shardwise.report.pick import pass_of

AXIS = {
    "replicate": "#e391d2",
    "shard": "#eba21c",
    "context": "#20a583",
    "tensor": "#ad385a",
    "pipeline": "#7350c8",
    "expert": "#8a8200",
}

OPTIMIZER = "#006d66"

CATEGORY = {
    "matmul": "#4276b6",
    "attention": "#5cb7f5",
    "memory": "#7193af",
    "host": "#84561c",
    **AXIS,
    "offload": "#773322",
    "bubble": "#c1bbb6",
    "optimizer": OPTIMIZER,
    "data": "#a89c50",
    "checkpoint": "#4c4268",
    "other": "#7eb688",
}

OWNER = {
    "parameters": "#306bac",
    "gradients": "#9163ef",
    "optimizer": OPTIMIZER,
    "activations": "#5bb8fe",
    "logits": "#c32420",
    "gathered": AXIS["shard"],  # unsharded parameters of ZeRO, caused by the shard axis
    "buffers": "#b58b5b",
    "workspace": "#a6abb1",
}

PASS = {
    "forward": "#303c9c",
    "recompute": "#8fc1e8",
    "backward": "#d8843a",
    "backward_input": "#e8a552",
    "backward_weight": "#a5561d",
    "optimizer": OPTIMIZER,
}

RAMP = ("#fac75a", "#d0a460", "#a98a68", "#83746d", "#5f6078", "#414f8f")
"""From low to high, by lightness as well as hue."""

UNKNOWN = "#8b8f98"


def of_category(name: str) -> str:
    """The colour of a category, `UNKNOWN` if it is not the ledger's."""
    return CATEGORY.get(name, UNKNOWN)


def of_owner(name: str) -> str:
    """The colour of an owner of memory, `UNKNOWN` if it is not the ledger's."""
    return OWNER.get(name, UNKNOWN)


def of_span(span: Span) -> str:
    """The colour of the span's pass if its name gives one, else of its category."""
    return PASS.get(pass_of(span)) or of_category(span.category)


def ink_on(color: str) -> str:
    """Black or white text, whichever is easier to read on this colour."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def shade(color: str, share: float) -> str:
    """The colour blended with white by a share, to distinguish neighbours of one kind."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def ramp(position: float) -> str:
    """The colour of a position between 0 (low) and 1 (high)."""
    return RAMP[min(len(RAMP) - 1, max(0, round(position * (len(RAMP) - 1))))]
