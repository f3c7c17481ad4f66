"""A simulated load is what the engine does, the same steps in the same order; its times add up from those of the steps."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from engines import engine_of

from shardwise.cli.main import main
from shardwise.hardware import find_chip
from shardwise.hardware.engine_facts import engine_facts
from shardwise.hardware.power import power_of
from shardwise.measure.serve_load import measure_load
from shardwise.plan.cost.job import cluster_of
from shardwise.plan.serving.cost import Serving
from shardwise.plan.serving.drafting import acceptance_of, tokens_a_step
from shardwise.plan.serving.engines import FORMATS, OURS
from shardwise.plan.serving.plan import layouts_of, plan_serving, search_serving
from shardwise.plan.serving.pool import host_pages, serving_memory
from shardwise.plan.serving.simulate import EngineSize, Stages, requests_of, simulate, step_sizes
from shardwise.plan.serving.step_time import Spent, StepTime
from shardwise.run import Run, UserError, read_planned, read_run
from shardwise.run.sections.serve import ServeConfig
from shardwise.schedules.serving.sequence import Step

LOAD = ["serve.concurrency=16", "serve.requests=40", "serve.input_tokens=U(20,400)", "serve.output_tokens=U(2,60)"]
PLACE = ["model.preset=llama3-8b", "model.max_positions=8192", "train.dtype=bfloat16", "cluster.chip=h200"]


def run_of(*more: str) -> Run:
    return read_run(None, [*PLACE, "cluster.devices_per_node=1", *LOAD, *more])


def times_of(run: Run) -> StepTime:
    form, cluster = FORMATS["bf16"], cluster_of(run)
    return StepTime(Serving(run.model, cluster, OURS, form, form), engine_facts(cluster.chip))


class Noted:
    """Step times that are remembered: one second for each step."""

    def __init__(self, gpu: bool, stages: int) -> None:
        self.gpu, self.serving = gpu, replace(times_of(run_of()).serving, pipeline=stages)
        self.steps: list[tuple[int, int, list[tuple[int, int]], int]] = []

    def of(self, *step: object) -> Spent:
        self.steps.append(step)  # type: ignore[arg-type]
        return Spent(0.0, 0.0, 1.0)


@pytest.mark.parametrize(("ahead", "stages"), [(False, 1), (True, 1), (False, 3)])
@pytest.mark.parametrize(
    ("pages", "preemption", "prefix_cache"),
    [(200, "recompute", False), (14, "recompute", False), (14, "recompute", True), (14, "swap", True)],
)
@pytest.mark.drawn(4, "ahead", "preemption")
def test_the_engine_executes_what_is_played(
    pages: int, preemption: Literal["recompute", "swap"], prefix_cache: bool, ahead: bool, stages: int
) -> None:
    """Also where pages run out and sequences are preempted, where steps are launched before the last are read, and where stages
    have steps under way."""
    settings = ServeConfig(
        max_sequences=5, max_step_tokens=16, page_tokens=4, prefix_cache=prefix_cache, preemption=preemption, concurrency=6,
        requests=12, input_tokens="U(1,8)", output_tokens="U(10,20)",
    )  # fmt: skip
    asked = requests_of(settings)
    noted, host_pages = Noted(ahead, stages), 6 if preemption == "swap" else 0
    simulated = simulate(settings, asked, noted, EngineSize(pages, host_pages, 64), concurrency=6)  # type: ignore[arg-type]
    engine = engine_of("llama", settings, pages, ahead=ahead, host_pages=host_pages, stages=stages)
    real, schedule = [], engine.scheduler.schedule

    def watched() -> Step:
        step = schedule()
        if step.chunks:
            real.append(step_sizes(step))
        return step

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    measured = measure_load(engine, settings, asked)
    assert noted.steps == real[-len(noted.steps) :]  # before them, it warmed up
    assert measured.engine == {
        "steps": simulated.steps,
        "preemptions": simulated.preemptions,
        "running": simulated.most_running,
        "pages": simulated.most_pages,
    }
    assert (simulated.preemptions > 0) == (pages < 100)
    assert measured.figures["output_tokens"] == sum(each.output for each in asked)


@pytest.mark.drawn(group="plans that serve")
def test_guesses_make_fewer_steps_and_take_their_time() -> None:
    """As many tokens a step as the formula says; a draft model's steps come on top, and one that is always right pays."""
    single = ("serve.concurrency=1", "serve.requests=4", "serve.output_tokens=400")
    plain = plan_serving(run_of(*single))
    draft = ("serve.speculate=draft", "serve.draft=llama3-1b")
    found = {}
    for name, words in {
        "never": ("serve.speculate=ngram", "serve.acceptance=0"),
        "half": ("serve.speculate=ngram", "serve.acceptance=0.5"),
        "always": (*draft, "serve.acceptance=1"),
        "draft": (*draft, "serve.acceptance=0.5"),
    }.items():
        found[name] = plan_serving(run_of(*single, *words))
    turns = {name: plan.as_dict()["engine"]["steps"] - 4 for name, plan in {**found, "plain": plain}.items()}
    assert turns["never"] == turns["plain"] == 4 * 399
    assert turns["always"] == 4 * 80  # 4 guesses and a token: 399 of them in 80 steps
    assert 4 * 399 / turns["half"] == pytest.approx(tokens_a_step(0.5, 4), rel=0.05)
    assert tokens_a_step(0.5, 4) == pytest.approx((1 - 0.5**5) / (1 - 0.5))
    assert acceptance_of(tokens_a_step(0.37, 4), 4) == pytest.approx(0.37)
    speed = {name: plan.as_dict()["output_tokens_per_s"] for name, plan in {**found, "plain": plain}.items()}
    assert speed["never"] < speed["plain"] < speed["half"]
    assert speed["draft"] < speed["half"]
    assert speed["plain"] < speed["always"]
    assert found["half"].as_dict()["speculation"]["tokens_a_step"] == tokens_a_step(0.5, 4)
    drafts = found["half"].as_dict()["engine"]
    assert drafts["accepted"] + turns["half"] == 4 * 399
    # The draft model's weights and pages have their place, to the byte.
    model = run_of("model.preset=llama3-1b", "model.max_positions=8192")
    small, large = serving_memory(model, cluster_of(model).chip), plain.memory
    memory = found["draft"].memory
    assert memory.draft == small.weights
    assert memory.page == large.page + small.page
    assert (
        memory.total
        == memory.weights + memory.draft + memory.activations + memory.libraries + memory.pages * memory.page
    )


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["serve.speculate=draft"], "needs a model that guesses"),
        (["serve.speculate=draft", "serve.draft=gpt2-124m"], "a vocabulary of 50257"),
        (["serve.speculate=draft", "serve.draft=no/such"], "is no checkpoint, run folder or preset"),
        (["serve.speculate=draft", "serve.draft=llama-1b"], "did you mean"),
        (["serve.speculate=draft", "serve.draft=llama3-8b", "model.sliding_window=100"], "sees further back"),
        (["serve.speculate=ngram", "serve.ngram_min=5"], "more than serve.ngram_max = 4"),
        (["serve.acceptance=1.5"], "1.5"),
        (["serve.draft_tokens=0"], "0"),
    ],
)
def test_guesses_that_cannot_be_made_are_refused_with_a_sentence(words: list[str], phrase: str) -> None:
    with pytest.raises(UserError, match=re.escape(phrase)):
        read_planned(None, [*PLACE, *LOAD, *words])


def test_one_request_takes_the_time_of_its_steps() -> None:
    """The first token is there when the step of its prompt is read, which is after the next is launched; the others follow as the
    device makes them."""
    run = run_of("serve.concurrency=1", "serve.requests=1", "serve.input_tokens=300", "serve.output_tokens=5")
    found = plan_serving(run, over_http=False).as_dict()
    times = times_of(run)
    first = times.of(0, 0, [(0, 300)], 1)
    later = [times.of(1, 300 + n, [], 1).device for n in range(1, 5)]
    done = max(first.before + first.device, first.before + first.launch)
    launched = first.before + first.launch + times.of(1, 301, [], 1).before
    assert found["ttft_ms"]["p50"] == pytest.approx(1e3 * max(done, launched))
    assert found["e2e_ms"]["p50"] == pytest.approx(1e3 * (max(done, launched) + sum(later)), rel=1e-3)
    over_http = plan_serving(run).as_dict()
    arrives = engine_facts(cluster_of(run).chip).profile.serve_arrive
    assert over_http["ttft_ms"]["p50"] == pytest.approx(found["ttft_ms"]["p50"] + 1e3 * arrives)


def test_a_step_of_measured_sizes_takes_what_was_measured() -> None:
    run = run_of()
    times = times_of(run)
    points = engine_facts(cluster_of(run).chip).profile
    layer = dict(hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128)
    for sequences, keys in ((1, 512), (32, 2048), (256, 512)):
        wanted = layer | dict(sequences=sequences, keys=keys)
        [decode] = [p["seconds"] for p in points.decode if wanted.items() <= p.items()]
        pick = next(p["seconds"] for p in points.pick if (p["hidden"], p["rows"]) == (4096, sequences))
        found = times.of(sequences, sequences * keys, [], sequences).device
        assert found == pytest.approx(32 * decode + pick, rel=1e-3)
    for prompts, tokens in ((1, 512), (1, 8192), (32, 64)):
        wanted = layer | dict(prompts=prompts, tokens=tokens, keys=tokens)
        [prompt] = [p["seconds"] for p in points.prompt if wanted.items() <= p.items()]
        pick = next(p["seconds"] for p in points.pick if (p["hidden"], p["rows"]) == (4096, prompts))
        found = times.of(0, 0, [(0, tokens)] * prompts, prompts).device
        # The last layer is whole only where tokens are sampled; what lengths of prompts cost is fitted to all of them.
        assert 0.99 * (31.1 * prompt + pick) < found < 1.01 * (32 * prompt + pick)


def test_times_grow_with_what_a_step_does() -> None:
    """Between measured sizes and beyond them, and for a network of another shape on another chip."""
    for more in ((), ("model.preset=qwen3-0.6b",), ("model.preset=llama3-3b", "cluster.chip=a100")):
        times = times_of(run_of(*more))
        decodes = [times.of(size, size * 700, [], size).device for size in (1, 16, 48, 256)]
        assert decodes == sorted(decodes)
        lengths = [times.of(32, 32 * keys, [], 32).device for keys in (40, 300, 1100, 5000)]
        assert lengths == sorted(lengths)
        prompts = [times.of(0, 0, [(before, 700)], 1).device for before in (0, 900, 3000)]
        assert prompts == sorted(prompts)
        mixed = [times.of(size, size * 700, [(0, 700)], 1).device for size in (0, 8, 256)]
        assert mixed == sorted(mixed)


def test_chips_without_facts_borrow_them() -> None:
    own, other = plan_serving(run_of()), plan_serving(run_of("cluster.chip=a100"))
    assert own.facts.own
    assert not other.facts.own
    assert other.facts.error >= 0.25
    assert "borrowed" in other.as_dict()["steps"]
    speeds = [plan.as_dict()["output_tokens_per_s"] for plan in (own, other)]
    assert speeds[0] > 1.5 * speeds[1]
    assert own.memory.total < own.facts.profile.device_bytes


@pytest.mark.drawn(group="plans that serve")
def test_a_rate_that_is_too_high_is_not_held() -> None:
    settings = ("serve.concurrency=0", "serve.requests=200", "serve.ttft_ms=400", "serve.input_tokens=1000")
    slow, fast = (plan_serving(run_of(*settings, f"serve.rate={rate}")) for rate in (2, 400))
    assert slow.holds
    assert not fast.holds
    assert slow.as_dict()["ttft_ms"]["p50"] < fast.as_dict()["ttft_ms"]["p50"]
    two = plan_serving(run_of(*settings, "serve.rate=400", "layout.replicate=2", "cluster.devices_per_node=2"))
    assert two.as_dict()["output_tokens_per_s"] > 1.5 * fast.as_dict()["output_tokens_per_s"]


@pytest.mark.parametrize("requests", [200, 1000])
def test_a_rate_that_piles_requests_up_is_not_held_without_limits_either(requests: int) -> None:
    """One device answers some 60 of these a second, and was said to hold thousands: while they pile up, all take longer."""
    load = ("serve.concurrency=0", "serve.input_tokens=512", "serve.output_tokens=128", f"serve.requests={requests}")
    plans = {rate: plan_serving(run_of(*load, f"serve.rate={rate}")) for rate in (5, 40, 150, 5000)}
    assert {rate: plan.holds for rate, plan in plans.items()} == {5: True, 40: True, 150: False, 5000: False}
    assert plans[5000].as_dict()["requests_per_s"] < 100


def test_answers_that_nobody_gets_have_no_price() -> None:
    """Nor is NaN JSON."""
    plan = plan_serving(run_of("serve.input_tokens=100", "model.max_positions=50")).as_dict()
    assert plan["failed"] == plan["requests"]
    assert json.loads(json.dumps(plan, allow_nan=False))["cost"]["usd_per_million_output_tokens"] is None


def test_pages_of_a_stage_without_layers_are_not_endless() -> None:
    """They hold no bytes: as many as the host has bytes were listed one by one, until the machine had no memory left."""
    model = ("layers=1", "hidden=64", "heads=4", "kv_heads=4", "head_dim=16", "ffn=64")
    words = ("layout.pipeline=2", "cluster.devices_per_node=2", "serve.preemption=swap", "serve.max_sequences=4")
    run = run_of(*(f"model.{word}" for word in model), *words)
    memory = serving_memory(run, cluster_of(run).chip)
    assert memory.page == 0
    assert host_pages(run, memory) == 4 * 8192 // 64 + 1
    assert plan_serving(run).figures.as_dict()["failed"] == 0


@pytest.mark.parametrize(
    ("load", "engines", "requests"),
    [
        (dict(concurrency=1000), 1, 2048),
        (dict(concurrency=1000), 4, 4000),
        (dict(concurrency=10), 4, 800),
        (dict(rate=9.0), 4, 2048),
        (dict(rate=9.0), 32, 6400),
        (dict(rate=9.0, requests=7), 32, 7),
    ],
)
def test_every_engine_gets_enough_requests(load: dict[str, Any], engines: int, requests: int) -> None:
    """4,096 clients of eight engines sent half a request each, and no engine ran as many as it could."""
    assert len(requests_of(ServeConfig(**load), engines=engines)) == requests


def test_a_client_stays_with_its_replica() -> None:
    """So replicas without a client do not make the others faster."""
    speeds = {}
    for clients, replicas in ((1, 1), (1, 4), (2, 2), (2, 4), (4, 4)):
        words = (f"serve.concurrency={clients}", f"layout.replicate={replicas}", f"cluster.devices_per_node={replicas}")
        found = plan_serving(run_of(*words, "serve.input_tokens=100", "serve.output_tokens=20")).as_dict()
        assert (found["requests"], found["failed"]) == (40, 0)
        speeds[clients, replicas] = found["output_tokens_per_s"]
    assert speeds[1, 4] == pytest.approx(speeds[1, 1])
    assert speeds[2, 4] == pytest.approx(speeds[2, 2]) == pytest.approx(2 * speeds[1, 1])
    assert speeds[4, 4] == pytest.approx(4 * speeds[1, 1])


MANY = 10**9


@pytest.mark.parametrize(
    ("words", "requests"),
    [
        (("serve.concurrency=4", f"layout.replicate={MANY}"), 40),
        (("serve.rate=4", f"layout.replicate={MANY}"), 40),
        ((f"serve.concurrency={MANY}", f"layout.replicate={MANY}"), 40),
        ((f"serve.concurrency={MANY}",), 40),
        (("serve.concurrency=2", "serve.requests=0", f"layout.replicate={MANY}"), 400),
    ],
)
def test_replicas_that_get_no_request_are_not_simulated(words: tuple[str, ...], requests: int) -> None:
    """A plan made a list for each of a milliard of replicas or clients."""
    short = ("serve.input_tokens=20", "serve.output_tokens=2")
    plan = plan_serving(read_planned(None, [*PLACE, *LOAD, *short, *words]).run)
    assert len(plan.simulated) <= requests
    assert (plan.figures.requests, plan.devices) == (requests, plan.run.layout.replicate)


@pytest.mark.parametrize(
    "words", [["serve.rate=4", f"layout.replicate={MANY}"], ["serve.rate=4", f"serve.max_sequences={MANY}"]]
)
@pytest.mark.parametrize("searched", [False, True])
def test_more_requests_than_can_be_simulated_are_refused(words: list[str], searched: bool) -> None:
    plan = search_serving if searched else plan_serving
    load = [
        *LOAD,
        "serve.requests=0",
        "serve.concurrency=0",
        *(["layout=auto", f"cluster.nodes={MANY}"] if searched else []),
    ]
    with pytest.raises(
        UserError, match=r"serve\.requests: 0 means [\d,]+,000,000,000 requests for .* 1,000,000 at most"
    ):
        plan(read_planned(None, [*PLACE, *load, *words]).run)


def test_a_layout_has_no_more_ranks_than_the_cluster_has_devices() -> None:
    place = [*PLACE, *LOAD, "cluster.nodes=2", "cluster.devices_per_node=4"]
    with pytest.raises(UserError, match=r"layout\.replicate: the layout has 16 ranks .*, and the cluster 8 devices"):
        read_planned(None, [*place, "layout.replicate=8", "layout.tensor=2"])
    assert plan_serving(read_planned(None, [*place, "layout.replicate=2"]).run).devices == 2


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


def test_prompts_behind_a_rest_are_computed_at_a_higher_clock() -> None:
    power = power_of(find_chip("h200"))
    assert power is not None
    prompts, reads, stages = Spent(0.0, 0.0, 0.1, 0.1), Spent(0.0, 0.0, 0.02), Stages(1, power)
    first = stages.run(0.0, prompts)
    assert 0.08 < first < 0.095  # 32 prompts of 128 tokens on an H200: 86 ms, and 97 ms one after another
    second = stages.run(0.0, prompts)
    assert second == pytest.approx(first + 0.1)  # it waited for the first, and nothing rested
    third = stages.run(0.0, reads)
    assert third == pytest.approx(second + 0.02)
    assert first < stages.run(0.0, prompts) - third < 0.1  # behind steps that read it is faster by some of that
    assert Stages(1).run(0.0, prompts) == 0.1


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
    with pytest.raises(UserError, match="only splits experts"):
        plan_serving(run_of("layout.shard=2", "cluster.devices_per_node=2"))


def test_a_search_finds_the_fewest_devices_that_hold_a_load() -> None:
    client = ["serve.concurrency=1", "serve.requests=4", "serve.input_tokens=100", "serve.output_tokens=50"]
    run = read_run(None, [*PLACE, *client, "layout=auto", "cluster.devices_per_node=4", "serve.tpot_ms=3.5"])
    ranking = search_serving(run)
    assert len({(plan.run.layout.replicate, plan.run.layout.tensor) for plan in ranking}) == len(ranking)
    best = ranking[0]
    assert best.holds
    assert best.run.layout.tensor > 1, "one device reads the weights no faster"
    assert all(plan.devices >= best.devices for plan in ranking if plan.holds)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}),
        (["layout.tensor=4"], {(1, 4)}),
        (["layout.tensor=2"], {(1, 2), (2, 2)}),
        (["layout.replicate=2"], {(2, 1), (2, 2)}),
        (["layout.replicate=3"], {(3, 1)}),
        (["layout.pipeline=2"], {(1, 1), (1, 2), (2, 1)}),
    ],
)
def test_a_search_keeps_what_is_fixed_and_to_the_cluster(words: list[str], found: set[tuple[int, int]]) -> None:
    """Replicas and tensor ranks, on four devices at most."""
    run = read_planned(None, [*PLACE, *LOAD, "layout=auto", "cluster.devices_per_node=4", *words]).run
    layouts = [candidate.layout for candidate in layouts_of(run)]
    assert {(layout.replicate, layout.tensor) for layout in layouts} == found
    assert len(layouts) == len(found)
    worlds = [layout.world for layout in layouts]
    assert worlds == sorted(worlds)
    assert worlds[-1] <= 4
    assert {layout.pipeline for layout in layouts} == {run.layout.pipeline}


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["serve.head=int8", "model.tied_embeddings=true"], "serve.head: int8 keeps the head apart"),
        (["layout.tensor=3"], "layout.tensor: 3 does not divide"),
        (["layout.tensor=8"], "layout: the given keys need more than the cluster's 4 devices"),
        (["model.preset=llama3-405b"], "room for the weights"),
    ],
)
def test_a_search_that_finds_nothing_says_why(words: list[str], phrase: str) -> None:
    run = read_planned(None, [*PLACE, *LOAD, "layout=auto", "cluster.devices_per_node=4", *words]).run
    with pytest.raises(UserError, match=re.escape(phrase)):
        search_serving(run)


def test_replicas_need_not_be_a_power_of_two() -> None:
    """A load that five engines hold, and four do not, is planned with five; all devices may serve, also six."""
    words = ["layout=auto", "layout.tensor=1", "serve.concurrency=0", "serve.requests=300", "serve.input_tokens=2000"]
    words += ["serve.output_tokens=20", "serve.rate=100", "cluster.devices_per_node=8"]
    run = read_planned(None, [*PLACE, *LOAD, *words]).run
    best = search_serving(run)[0]
    assert best.holds
    assert best.devices == 5
    fewer = replace(run.layout, auto=False, fixed=(), replicate=best.run.layout.replicate - 1)
    assert not plan_serving(replace(run, layout=fewer)).holds
    six = read_planned(None, [*PLACE, *LOAD, *words, "cluster.devices_per_node=6"]).run
    assert [candidate.layout.replicate for candidate in layouts_of(six)] == [1, 2, 4, 6]


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
    assert "is served" in shown
    assert "tensor 2" in shown
    one = [f"--{word}" for word in (*PLACE, "serve.concurrency=1", "serve.requests=2")]
    assert main(["plan", *one, "--cluster.devices_per_node=1"]) == 0
    assert "1 client " in capsys.readouterr().out


RUN = """
[model]
layers = 2
hidden = 64
heads = 4
kv_heads = 2
vocab = 256
max_positions = 512
[train]
dtype = "float32"
device = "cpu"
[cluster]
chip = "h200"
[serve]
concurrency = 6
requests = 10
input_tokens = "U(5,40)"
output_tokens = "U(2,12)"
max_sequences = 4
page_tokens = 4
max_step_tokens = 32
"""


@pytest.mark.drawn(group="plans that serve")
def test_verify_gives_the_load_to_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    assert main(["verify", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    values = {(each["account"], each["name"]): (each["plan"], each["run"]) for each in found["differences"]}
    exact = [
        ("load", "requests"),
        ("load", "output tokens"),
        ("engine", "steps"),
        ("engine", "pages"),
        ("pool", "pages"),
    ]
    for key in [*exact, ("memory", "weights"), ("memory", "kv cache")]:
        assert values[key][0] == values[key][1] > 0
    for name in ("ttft p50", "tpot p99"):
        assert min(values["time", name]) > 0
    assert found["run"]["engine"]["steps"] == found["plan"]["engine"]["steps"]
    # With guesses too, whose number is taken from what was measured.
    small = tmp_path / "small.toml"
    small.write_text(RUN.replace("layers = 2", "layers = 1"))
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "run.toml").write_text(small.read_text())
    guessing = ["--serve.speculate=draft", f"--serve.draft={folder}", "--serve.draft_tokens=2"]
    assert main(["verify", str(path), "--json", *guessing]) == 0
    guessed = json.loads(capsys.readouterr().out)
    rows = {each["name"]: (each["plan"], each["run"]) for each in guessed["differences"]}
    for name in ("weights", "draft weights", "kv cache", "pages"):
        assert rows[name][0] == rows[name][1] > 0
    assert guessed["run"]["engine"]["drafted"] > 0
    # A measured load is read again, and held against another plan.
    measured = tmp_path / "load.json"
    measured.write_text(json.dumps(found["run"]))
    assert main(["verify", str(path), "--load", str(measured), "--serve.requests=9"]) == 1
    assert "output tokens" in capsys.readouterr().out
    assert main(["verify", str(path), "--load", str(measured), "--cluster.chip=cpu", "--time=0"]) == 1
    for words, said in (
        (["--dry"], "is for runs that train"),
        (["--load", str(path)], "is not JSON"),
        (["--load", str(tmp_path / "none")], "cannot be read"),
        (["--layout.replicate=2"], "the engine of one device"),
    ):
        assert main(["verify", str(path), *words]) == 2
        assert said in capsys.readouterr().err
