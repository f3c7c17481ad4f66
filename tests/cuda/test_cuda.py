"""The whole stack on a GPU, where there is one: it computes what the CPU computes, alone over NCCL, and on several ranks that
share the GPU as far as gloo carries CUDA tensors: every collective, but no point-to-point message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from parallel_pool import RankPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODELS = ["dense", "mixture", "tied", "latent", "softmax", "capacity", "window"]


def alone_over_nccl(rank: int, model: str, layout: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
    import tempfile

    import torch.distributed as dist

    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("nccl", init_method=f"file://{store.name}", rank=0, world_size=1)
        return cases.train(0, cases.make_run(model, layout, **train | dict(device="cuda")))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", [dict(), dict(recompute="full"), dict(schedule="interleaved")], ids=str)
def test_one_rank_over_nccl_equals_the_cpu(ranks: RankPool, model: str, layout: dict[str, Any]) -> None:
    want = cases.train(0, cases.make_run(model, layout))
    got = ranks.run(1, alone_over_nccl, model, layout, {})[0]
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-9)
    np.testing.assert_allclose(got["norms"], want["norms"], rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_narrow_arithmetic_follows_the_cpu(ranks: RankPool, model: str, dtype: str) -> None:
    want = cases.train(0, cases.make_run(model, {}, dtype="float64", lr=1e-3))
    got = ranks.run(1, alone_over_nccl, model, {}, dict(dtype=dtype, lr=1e-3))[0]
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-4 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_loss_in_chunks_equals_the_cpu(ranks: RankPool, dtype: str) -> None:
    want = cases.train(0, cases.make_run("dense", {}))
    got = ranks.run(1, alone_over_nccl, "dense", {}, dict(dtype=dtype, loss="chunked"))[0]
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-9 if dtype == "float64" else 1e-4)
    np.testing.assert_allclose(got["norms"], want["norms"], rtol=1e-9 if dtype == "float64" else 1e-3)


def test_parameters_and_optimizer_may_live_in_the_cpus_memory(ranks: RankPool) -> None:
    want = cases.train(0, cases.make_run("dense", {}))
    got = ranks.run(1, offloaded)[0]
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-9)
    np.testing.assert_allclose(got["norms"], want["norms"], rtol=1e-9)
    assert got["devices"] == ["cpu"]


def offloaded(rank: int) -> dict[str, Any]:
    import tempfile

    import torch.distributed as dist

    from shardwise.train.step import TrainState

    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store.name}", rank=0, world_size=1)
        train_state = TrainState(cases.make_run("dense", dict(offload=True), device="cuda"))
        losses, norms = cases.steps(train_state, 0, 3, True)
        kept = [*train_state.optimizer.shards, *train_state.optimizer.state_of(0).values()]
        return dict(losses=losses, norms=norms, devices=sorted({t.device.type for t in kept}))


SHARED = [
    dict(replicate=2),
    dict(shard=2),
    dict(shard=2, zero=1),
    dict(replicate=2, shard=2),
    dict(tensor=2),
    dict(context=2, context_method="ulysses"),
    dict(context=2, context_method="gather"),
    dict(shard=2, expert=2),
    dict(shard=2, tensor=2),
]


@pytest.mark.parametrize("layout", SHARED, ids=str)
def test_ranks_that_share_a_gpu_equal_the_cpu(ranks: RankPool, layout: dict[str, Any]) -> None:
    model = "mixture" if "expert" in layout else "dense"
    want = cases.train(0, cases.make_run(model, {}))
    run = cases.make_run(model, layout, device="cuda")
    for got in ranks.run(run.layout.world, cases.train, run):
        np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-9)
        np.testing.assert_allclose(got["norms"], want["norms"], rtol=1e-9)


def saved_and_resumed(rank: int, out: Path, offload: bool) -> list[dict[str, Any]]:
    """Five steps without a stop, and two, a checkpoint, and three more."""
    import tempfile

    import checkpoint_cases
    import torch.distributed as dist

    from shardwise.train.step import TrainState

    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store.name}", rank=0, world_size=1)
        run = cases.make_run("mixture", dict(offload=offload), device="cuda", dtype="float32")
        want = cases.steps(TrainState(run), 0, 5, True)
        train_state = checkpoint_cases.trained(run, 2)
        saver = checkpoint_cases.saver_of(train_state, out)
        saver.save(train_state, dict(note=[1, 2]))
        cases.steps(train_state, 2, 3, True)  # goes on while it is written
        assert saver.finish() == ""
        assert saver.staging.pinned
        got = checkpoint_cases.resume_and_train(0, run, out, 5)
        return [dict(losses=want[0][2:], norms=want[1][2:]), dict(losses=got["losses"], norms=got["norms"])]


@pytest.mark.parametrize("offload", [False, True])
def test_a_checkpoint_from_the_gpu_goes_on_from_there(ranks: RankPool, tmp_path: Path, offload: bool) -> None:
    want, got = ranks.run(1, saved_and_resumed, tmp_path, offload)[0]
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-5)
    np.testing.assert_allclose(got["norms"], want["norms"], rtol=1e-4)


def small_run(**keys: Any) -> Any:
    from shardwise.run import run_from_dict

    model = dict(layers=2, hidden=256, heads=4, kv_heads=2, ffn=768, vocab=1000)
    train = dict(global_batch=4, seq_len=128, dtype="bfloat16", device="cuda", lr=1e-3) | keys
    return run_from_dict(dict(model=model, train=train))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_waits_for_nothing_on_the_device(compiled: bool) -> None:
    from shardwise.measure.verify import random_batch
    from shardwise.train.step import TrainState

    run = small_run(compile=compiled)
    train_state = TrainState(run)
    for number in range(3):
        train_state.train_step(random_batch(run, number)).read()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = train_state.train_step(random_batch(run, 3))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(np.isfinite(result.read()[:2]))


def test_adamw_in_one_pass_is_pytorchs() -> None:
    from shardwise.measure.verify import random_batch
    from shardwise.train.optimizers import optimizer
    from shardwise.train.step import TrainState

    run = small_run(dtype="float32", loss="plain", clip=0.05)
    ends = []
    for one_pass in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not one_pass:
                patch.setattr(optimizer, "fits_fused_adamw", lambda parameters: False)
            train_state = TrainState(run)
        starts = [p.detach().clone() for p in train_state.model.parameters()]
        kinds = [type(part).__name__ for part in train_state.optimizer.parts]
        assert kinds == (["FusedAdamW"] if one_pass else ["AdamW"])
        for number in range(4):
            train_state.train_step(random_batch(run, number))
        ends.append([p.detach() for p in train_state.model.parameters()])
        state = train_state.optimizer.state_of(0)
        assert float(state["step"]) == 4
    # A number whose gradient is nearly nothing may go either way; all of them together may not.
    for mine, theirs, start in zip(*ends, starts, strict=True):
        assert (mine - theirs).norm() < 1e-4 * (theirs - start).norm()
