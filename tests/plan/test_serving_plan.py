"""A played load is what the engine does, the same steps in the same order; its times add up from those of the steps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from engines import VOCAB, engine_of

from shardwise.cli.main import main
from shardwise.plan.serving.engines import ENGINES, FORMATS
from shardwise.plan.serving.inference import constants_of, fitted_inference
from shardwise.plan.serving.plan import Serving, plan_serving, search_serving
from shardwise.plan.serving.play import play, requests_of
from shardwise.plan.serving.step_time import StepTime
from shardwise.run import Run, UserError, read_planned, read_run
from shardwise.run.serve_config import ServeConfig
from shardwise.serve.request import Request, Sampling

LOAD = ["serve.concurrency=16", "serve.requests=40", "serve.input_tokens=U(20,400)", "serve.output_tokens=U(2,60)"]
PLACE = ["model.preset=llama3-8b", "model.max_positions=8192", "train.dtype=bfloat16", "cluster.chip=h200"]


def run_of(*more: str) -> Run:
    return read_run(None, [*PLACE, "cluster.devices_per_node=1", *LOAD, *more])


def times_of(run: Run) -> StepTime:
    from shardwise.plan.cost.job import cluster_of

    form = FORMATS["bf16"]
    serving = Serving(run.model, cluster_of(run), ENGINES["shardwise"], form, form)
    return StepTime(serving, constants_of(serving, fitted_inference()["effects"]))


class Noted:
    """Step times that are remembered: one second for each step."""

    def __init__(self, times: StepTime) -> None:
        self.serving, self.constants = times.serving, {**times.constants, "arrive": 0.0}
        self.steps: list[tuple[int, int, list[tuple[int, int]], int]] = []

    def seconds(self, *step: object) -> float:
        self.steps.append(step)  # type: ignore[arg-type]
        return 1.0


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("pages", [200, 14])
def test_the_engine_executes_what_is_played(pages: int, stages: int) -> None:
    """Also where pages run out, and sequences are preempted; and where stages have steps under way."""
    settings = ServeConfig(
        max_sequences=5, max_step_tokens=16, page_tokens=4, prefix_cache=False, concurrency=8, requests=8,
        input_tokens="U(1,8)", output_tokens="U(10,20)",
    )  # fmt: skip
    asked = requests_of(settings)
    noted = Noted(times_of(run_of()))
    noted.serving = replace(noted.serving, pipeline=stages)
    played = play(settings, asked, noted, pages, 64, concurrency=8)  # type: ignore[arg-type]
    engine = engine_of("llama", settings, pages, ahead=False, stages=stages)
    for n, (_, prompt, answer) in enumerate(asked):
        engine.add(Request(str(n), tuple(k % VOCAB for k in range(prompt)), answer, Sampling(0.0), ignore_end=True))
    real, schedule = [], engine.scheduler.schedule

    def watched() -> object:
        step = schedule()
        chunks = step.chunks
        if chunks:
            decoding, prompts = chunks[: step.decoding], chunks[step.decoding :]
            keys = sum(chunk.start + 1 for chunk in decoding)
            real.append((step.decoding, keys, [(chunk.start, chunk.count) for chunk in prompts], step.sampling))
        return step

    engine.scheduler.schedule = watched  # type: ignore[assignment, method-assign]
    while not engine.idle:
        engine.step()
    assert noted.steps == real
    assert played.preemptions == engine.stats().preemptions
    assert (played.preemptions > 0) == (pages < 100)
    assert played.steps == len(real)
    assert sum(made.output_tokens for made in played.figures.made) == sum(answer for *_, answer in asked)


def test_one_request_takes_the_time_of_its_steps() -> None:
    run = run_of("serve.concurrency=1", "serve.requests=1", "serve.input_tokens=300", "serve.output_tokens=5")
    found = plan_serving(run).as_dict()
    times = times_of(run)
    first = times.seconds(0, 0, [(0, 300)], 1)
    later = [times.seconds(1, 300 + n, [], 1) for n in range(1, 5)]
    assert found["ttft_ms"]["p50"] == pytest.approx(1e3 * first)
    assert found["tpot_ms"]["p50"] == pytest.approx(1e3 * sum(later) / 4)
    assert found["e2e_ms"]["p50"] == pytest.approx(1e3 * (first + sum(later)))
    assert found["output_tokens_per_s"] == pytest.approx(5 / (first + sum(later)))


def test_a_rate_that_is_too_high_is_not_held() -> None:
    settings = ("serve.concurrency=0", "serve.requests=200", "serve.ttft_ms=400", "serve.input_tokens=1000")
    slow, fast = (plan_serving(run_of(*settings, f"serve.rate={rate}")) for rate in (2, 400))
    assert slow.holds
    assert not fast.holds
    assert slow.as_dict()["ttft_ms"]["p50"] < fast.as_dict()["ttft_ms"]["p50"]
    two = plan_serving(run_of(*settings, "serve.rate=400", "layout.replicate=2", "cluster.devices_per_node=2"))
    assert two.as_dict()["output_tokens_per_s"] > 1.5 * fast.as_dict()["output_tokens_per_s"]


def test_stages_work_on_other_steps_at_a_time() -> None:
    """Not faster for one client, but for many, and most where computing takes longer than reading weights, as of prompts."""
    found = {}
    for stages in (1, 4):
        for clients in (1, 64):
            lengths = ("serve.input_tokens=2000", "serve.output_tokens=8", "serve.requests=64")
            load = (*lengths, f"serve.concurrency={clients}", f"layout.pipeline={stages}")
            plan = plan_serving(run_of(*load, f"cluster.devices_per_node={stages}"))
            found[stages, clients] = plan.as_dict()["output_tokens_per_s"]
    assert found[4, 1] == pytest.approx(found[1, 1], rel=0.1)
    assert 2 * found[1, 64] < found[4, 64] < 4 * found[1, 64]


def test_experts_are_dealt_out_over_tensor_ranks() -> None:
    words = [
        "model.preset=mixtral-8x7b",
        "train.dtype=bfloat16",
        "cluster.chip=h200",
        "cluster.devices_per_node=4",
        *LOAD,
    ]
    plans = [
        plan_serving(read_planned(None, [*words, "layout.tensor=4", f"layout.expert={expert}"]).run)
        for expert in (1, 4)
    ]
    assert plans[0].memory.weights == plans[1].memory.weights
    assert plans[1].as_dict()["layout"]["expert"] == 4
    with pytest.raises(UserError, match="only to hold other experts"):
        plan_serving(run_of("layout.shard=2", "cluster.devices_per_node=2"))


def test_a_search_finds_the_fewest_devices_that_hold_a_load() -> None:
    run = read_run(None, [*PLACE, *LOAD, "layout=auto", "cluster.devices_per_node=4", "serve.tpot_ms=4.2"])
    ranking = search_serving(run)
    assert len({(plan.run.layout.replicate, plan.run.layout.tensor) for plan in ranking}) == len(ranking)
    best = ranking[0]
    assert best.holds
    assert best.run.layout.tensor > 1, "one device reads the weights no faster"
    assert all(plan.devices >= best.devices for plan in ranking if plan.holds)


def test_lengths_that_do_not_fit_are_counted_as_failed() -> None:
    found = plan_serving(run_of("serve.input_tokens=U(8000,9000)")).as_dict()
    assert 0 < found["failed"] < found["requests"]
    with pytest.raises(UserError, match="no room"):
        plan_serving(replace(run_of("model.preset=llama3-405b")))


def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"--{word}" for word in [*PLACE, *LOAD]]
    assert main(["plan", *words, "--cluster.devices_per_node=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {"requests", "failed", "output_tokens_per_s", "ttft_ms", "tpot_ms", "memory", "layout", "cost"}
    assert names <= set(found)
    assert {"p50", "p90", "p99"} <= set(found["ttft_ms"])
    assert main(["plan", *words, "--cluster.devices_per_node=2", "--layout=auto"]) == 0
    shown = capsys.readouterr().out
    assert "is held" in shown
    assert "tensor 2" in shown
