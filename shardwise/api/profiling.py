"""`with shardwise.profile(module) as p:` counts and times the operations of a PyTorch module, and `p` shows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.api.results import Result
from shardwise.report import words
from shardwise.report.module_tree import HEADS, lines
from shardwise.run.problems import UserError, counted

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import nn

    from shardwise.measure.profiler.tree import Node

DEPTH = 3


class Profile(Result):
    """The operations of a module while it was profiled. FLOPs and seconds are sums over everything that ran; activations are those
    of one forward pass."""

    def __init__(self, module: nn.Module, peak: float, memory: bool, time: bool, depth: int) -> None:
        from shardwise.measure.profiler.watch import Watch

        self.module, self.depth, self._peak = module, depth, peak
        self._watch = Watch(module, memory=memory, time=time)

    def __enter__(self) -> Profile:
        self._watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__(*error)

    @property
    def modules(self) -> list[Node]:
        """Every submodule, the module itself first, and last the operations outside of it."""
        from shardwise.measure.profiler.tree import tree_of

        return tree_of(self.module, self._watch)

    def _total(self, which: Sequence[str]) -> float:
        return float(sum(amount for (_, each), amount in self._watch.flops.items() if each in which))

    @property
    def flops(self) -> float:
        """Model FLOPs: forward and backward, without recomputation."""
        return self._total(("forward", "backward"))

    @property
    def forward_flops(self) -> float:
        """FLOPs of forward passes alone; `macs` is half of it."""
        return self._total(("forward",))

    @property
    def macs(self) -> float:
        """Multiply-adds of forward passes, which papers on vision call FLOPs."""
        return self.forward_flops / 2

    @property
    def backward_flops(self) -> float:
        """FLOPs of backward passes, without recomputation."""
        return self._total(("backward",))

    @property
    def recompute_flops(self) -> float:
        """FLOPs of activation checkpointing, and of the recomputation inside the backward kernels of fused attention."""
        return self._total(("recompute",)) + float(sum(self._watch.fused.values()))

    @property
    def parameters(self) -> int:
        """Parameters of the module; shared ones count once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def activations(self) -> float:
        """Bytes that autograd saves in one forward pass."""
        return sum(self._watch.saved.values()) / max(1, self._watch.calls[""])

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last line of the block."""
        return self._watch.clock.total

    @property
    def peak(self) -> float:
        """Peak FLOP/s of the device in the dtype with the most FLOPs; 0 if it is not known."""
        if self._peak or self._watch.device.type != "cuda" or not self._watch.by_dtype:
            return self._peak
        import torch

        from shardwise.hardware.chips import chip_of_driver_name

        chip = chip_of_driver_name(torch.cuda.get_device_name(self._watch.device))
        dtype = str(max(self._watch.by_dtype, key=lambda each: self._watch.by_dtype[each])).removeprefix("torch.")
        return 0.0 if chip is None else chip.peak.get("fp8" if dtype.startswith("float8") else dtype, 0.0)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs as a fraction of what the peak would do in the same seconds; None if either is not known."""
        return self.flops / (self.peak * self.seconds) if self.peak and self.seconds else None

    @property
    def not_counted(self) -> dict[str, int]:
        """Operators that may multiply but have no known FLOP formula, with their number of calls. `register_flop_formula` of
        `torch.utils.flop_counter` adds a formula."""
        return dict(self._watch.unknown)

    def to_dict(self) -> dict[str, Any]:
        from shardwise.measure.profiler.tree import CONVENTION

        return {
            "convention": CONVENTION,
            "flops": {"model": self.flops, "forward": self.forward_flops, "backward": self.backward_flops,
                      "recompute": self.recompute_flops},
            "macs": self.macs, "parameters": self.parameters, "activations": self.activations, "seconds": self.seconds,
            "passes": self._watch.calls[""], "peak": self.peak, "mfu": self.mfu, "not_counted": self.not_counted,
            "modules": [node.as_dict() for node in self.modules],
        }  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for node in self.modules:
            flops = {f"flops_{name}": amount for name, amount in node.whole.flops.items()}
            seconds = {f"seconds_{name}": amount for name, amount in node.whole.seconds.items()}
            plain = {"module": node.name, "type": node.kind, "calls": node.calls, "parameters": node.whole.parameters}
            found.append(plain | flops | {"activations": node.whole.activations} | seconds)
        return found

    def _figures(self) -> list[tuple[str, str, str]]:
        from shardwise.measure.profiler.tree import CONVENTION

        both = f"{words.flops(self.forward_flops)} forward, {words.flops(self.backward_flops)} backward"
        again = f"; {words.flops(self.recompute_flops)} more recomputed" if self.recompute_flops else ""
        passes = self._watch.calls[""]
        figures = [
            (
                "module",
                type(self.module).__name__,
                f"{words.count(self.parameters)} parameters, {counted(passes, 'forward pass')}",
            ),
            ("operations", words.flops(self.flops), f"{both}{again}"),
            ("saved", words.size(self.activations), "for the backward pass of one forward pass"),
        ]
        if self.seconds:
            speed = words.flops(self.flops / self.seconds, "FLOP/s")
            figures.append(("time", words.seconds(self.seconds), f"{speed} on {self._watch.device}"))
        if self.mfu is not None:
            figures.append(("MFU", words.percent(self.mfu), f"of a peak of {words.flops(self.peak, 'FLOP/s')}"))
        figures.append(("counted", CONVENTION.partition(":")[0], CONVENTION.partition(": ")[2]))
        if self.not_counted:
            names = ", ".join(f"{name} ({calls}×)" for name, calls in self.not_counted.items())
            figures.append(("not counted", f"{len(self.not_counted)} operators", f"no formula is known of {names}"))
        return figures

    def _table(self) -> list[list[str]]:
        total = self.seconds
        return [line.cells(total) for line in lines([node.as_dict() for node in self.modules], self.depth)]

    def page(self) -> str:
        from shardwise.report import html

        rows = [
            [html.cell(name.replace("  ", "\u2003")), html.cell(kind), *(html.cell(text, "n") for text in numbers)]
            for name, kind, *numbers in self._table()
        ]
        table = html.Section(
            "Modules", "Each with its submodules.", html.table_of(HEADS, rows, numbers_from=2, wide=True)
        )
        title = f"Profile of {type(self.module).__name__}"
        return html.page(title, [html.key_figures(self._figures()), table])

    def _shown(self) -> Sequence[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        from shardwise.report import terminal

        table = Table(box=None, pad_edge=False, header_style="dim", collapse_padding=True)
        rows = self._table()
        for at, head in enumerate(HEADS):
            text, wide = at < 2, max(len(row[at]) for row in [HEADS, *rows])
            # If there is too little room, names are cut and numbers are not.
            most = 22 if at == 0 else 18 if at == 1 else None
            table.add_column(
                head,
                justify="left" if text else "right",
                no_wrap=True,
                max_width=most,
                min_width=None if text else wide,
            )
        for row in rows:
            table.add_row(*map(Text, row))
        return [terminal.key_figures(self._figures()), table]

    def to_tensorboard(self, folder: str | Path, step: int = 0) -> None:
        """Write FLOPs, seconds and saved bytes of every module as scalars, and the table as text."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise UserError(
                "to_tensorboard() needs tensorboard, which is not installed: pip install tensorboard"
            ) from None
        with SummaryWriter(str(folder)) as writer:
            for node in self.modules:
                name = node.name.replace(".", "/") or "model"
                writer.add_scalar(f"flops/{name}", sum(node.whole.flops.values()), step)
                writer.add_scalar(f"seconds/{name}", sum(node.whole.seconds.values()), step)
                writer.add_scalar(f"saved/{name}", node.whole.activations, step)
            writer.add_text("profile", f"```\n{self!r}\n```", step)


def profile(
    module: nn.Module, *, peak: float = 0.0, memory: bool = True, time: bool = True, depth: int = DEPTH
) -> Profile:
    """Profile a PyTorch module: FLOPs, parameters, saved activations and time of each submodule, forward, backward and recomputed.

    with shardwise.profile(model) as p:
        model(x).sum().backward()
    print(p)

    `peak` is the device's peak FLOP/s, for the MFU; not needed for known GPUs. Compiled modules run eagerly meanwhile.
    """
    from torch.nn import Module

    if not isinstance(module, Module):
        raise UserError(f"a module is a torch.nn.Module, not {type(module).__name__}")
    return Profile(module, peak, memory, time, depth)
