"""The kernels that a step launches for adapters, counted as operators of a real step, beside those of its plan."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from shardwise.measure.verify import random_batch
from shardwise.plan.cost.job import job_of
from shardwise.plan.cost.operations import layer
from shardwise.plan.plan import plan
from shardwise.run import Run, run_from_dict
from shardwise.torch_private import TorchDispatchMode
from shardwise.train.step import TrainState


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


def adapted(kind: str, layers: int, device: str = "cpu") -> Run:
    keys = dict(seq_len=16, dtype="bfloat16", device=device, eval_every=0, loss="plain", global_batch=1)
    return run_from_dict(
        dict(
            model=dict(layers=layers, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=16), adapter=dict(kind=kind, rank=2),
            train=keys, cluster=dict(chip="h200"),
        )
    )  # fmt: skip


def operators_of_a_layer(kind: str) -> Counter[str]:
    """That a step of a real network calls for one layer more."""
    found = []
    for layers in (2, 1):
        run = adapted(kind, layers)
        state = TrainState(run)
        with OperatorCounter() as counter:
            state.train_step(random_batch(run))
        found.append(counter.calls)
    found[0].subtract(found[1])
    return found[0]


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_kernels_of_adapters_are_counted_as_they_are_launched(kind: str) -> None:
    """GEMMs, matrices made of 4 bits, and what scales and adds the output of an adapter; a compiler joins some of the last."""
    plain, real = operators_of_a_layer("none"), operators_of_a_layer(kind)
    ops = layer(job_of(adapted(kind, 1, "cuda")), routed=False)

    def launched(*names: str) -> float:
        return sum(sum(op.launches) for op in ops if op.name.endswith(names))

    gemms = sum(sum(op.launches) for op in ops if op.category == "matmul")
    joined = 0 if kind == "qlora" else 2 * 3  # q, k and v, and gate and up, are one GEMM each, forward and backward
    assert gemms + joined == real["aten.mm.default"]
    assert launched("of 4 bits") == real["shardwise.dequantize_nf4.default"]
    added = sum(real[name] - plain[name] for name in ("aten.mul.Tensor", "aten.add.Tensor"))
    casts = 7 * 2 * 2  # A and B of seven matrices, and their gradients
    frozen_norms = 2  # whose weights have no gradient, a product each
    assert launched("adapter added") == added + frozen_norms + casts


@pytest.mark.parametrize(
    ("preset", "batch", "length", "measured", "within"),
    [("llama3-8b", 2, 2048, 1.063, 0.07), ("llama3-70b", 1, 1024, 1.574, 0.12)],
    ids=["8b", "70b"],
)
def test_a_step_launched_kernel_by_kernel_takes_what_its_host_takes(
    preset: str, batch: int, length: int, measured: float, within: float
) -> None:
    """QLoRA on an H200 (benchmarks/gpu/RESULTS.md, "Tuning"). The host's constant is from the first; the second holds it."""

    def planned(cuda_graph: bool) -> float:
        keys = dict(seq_len=length, global_batch=batch, microbatch=1, dtype="bfloat16", device="cuda", eval_every=0)
        run = run_from_dict(
            dict(
                model=dict(preset=preset), adapter=dict(kind="qlora"), layout=dict(recompute="full"),
                train=keys | dict(cuda_graph=cuda_graph), cluster=dict(chip="h200"),
            )
        )  # fmt: skip
        return plan(run).account.step_seconds

    assert planned(cuda_graph=False) == pytest.approx(measured, rel=within)
    assert planned(cuda_graph=True) < 0.7 * measured
