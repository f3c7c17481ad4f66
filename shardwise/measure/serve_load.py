"""Runs the load of a serving plan on a real engine and records the quantities of the plan: request latencies, engine steps, and
memory by owner. The engine runs in this process, without a server.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from shardwise.hardware import chip_of_driver_name, find_chip
from shardwise.hardware.engine_facts import LENDER
from shardwise.model import Transformer
from shardwise.model.device import choose_device
from shardwise.model.quantized.model import stored_bytes
from shardwise.plan.serving.drafting import acceptance_of
from shardwise.plan.serving.plan import plan_serving
from shardwise.plan.serving.pool import draft_run
from shardwise.plan.serving.served import ServedLoad
from shardwise.plan.serving.simulate import requests_of
from shardwise.plan.serving.verdict import LoadVerdict
from shardwise.run import Run, UserError
from shardwise.run.load import LoadRequest, prompt_tokens
from shardwise.run.sections.serve import ServeConfig
from shardwise.schedules.serving.figures import TOO_LONG, Limits, LoadFigures, RequestTimes
from shardwise.schedules.serving.scheduler import SchedulerCounters
from shardwise.serve.engine import Engine, engine_of
from shardwise.serve.request import Request, Sampling
from shardwise.serve.runner import Runner
from shardwise.serve.speculate.draft import DraftModel

WARM = 32
"""Warm-up requests before the measured ones."""
TEMPERATURE = 0.6
"""Sampling temperature of the answers, so that tokens are sampled as for most clients."""


def random_model(run: Run) -> Transformer:
    """The run's network on this machine's device, with random weights; the time of a step does not depend on them."""
    device, dtype = choose_device(run.train.device), getattr(torch, run.train.dtype)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Transformer(run.model, dtype=dtype).eval()
    finally:
        torch.set_default_dtype(default)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.normal_(0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    return model


def ready_engine(run: Run) -> Engine:
    """An engine with random weights, also for the draft model, with its CUDA graphs captured."""
    draft = draft_run(run)
    engine = engine_of(random_model(run), run, draft=random_model(draft) if draft is not None else None)
    engine.warm()
    gc.collect()
    gc.freeze()  # as the server does: these objects stay, and scanning them again would delay steps
    return engine


def here(run: Run) -> Run:
    """The run on this machine's device, whatever chip it names, so that its pages, steps and times are that device's."""
    device = choose_device(run.train.device)
    name = "cpu"
    if device.type == "cuda":
        chip = chip_of_driver_name(torch.cuda.get_device_name(device))
        name = chip.name if chip else run.cluster.chip or LENDER
    same = name == find_chip(run.cluster.chip or "cpu").name
    cluster = replace(run.cluster, chip=name, nodes=1, devices_per_node=1, profile=run.cluster.profile if same else "")
    return replace(run, cluster=cluster)


def verify_load(run: Run, say: Callable[[str], None] = lambda text: None) -> LoadVerdict:
    """Plan the run's load for this machine and measure it, both without HTTP."""
    run = here(run)
    say("starting an engine of random weights")
    engine = ready_engine(run)
    asked = requests_of(run.serve, run.train.seed, run.layout.replicate)

    def tell(done: int) -> None:
        say(f"{done} of {len(asked)} answered")

    measured = measure_load(engine, run.serve, asked, run.train.seed, tell)
    if run.serve.speculate != "none":  # the plan cannot know how often draft tokens are accepted
        run = replace(run, serve=replace(run.serve, acceptance=_acceptance(run.serve, measured)))
    say("planning")
    return LoadVerdict(plan_serving(run, over_http=False), measured)


def _acceptance(serve: ServeConfig, measured: ServedLoad) -> float:
    """The acceptance rate that yields the measured number of accepted draft tokens a step. The first token of an answer is sampled
    by its prefill, so it is left out."""
    figures, accepted = measured.figures, measured.engine["accepted"]
    turns = figures["output_tokens"] - figures["requests"] - accepted
    return acceptance_of(1 + accepted / max(1, turns), serve.draft_tokens)


def measure_load(
    engine: Engine, serve: ServeConfig, asked: Sequence[LoadRequest], seed: int = 0, tell: Callable[[int], None] = lambda n: None
) -> ServedLoad:  # fmt: skip
    """Run the load on the engine. Requests arrive at their due times, or `serve.concurrency` of them are in flight at a time.
    `tell` gets the number of finished requests."""
    vocab, sampling = engine.vocab, Sampling(TEMPERATURE)
    prompts = [tuple(prompt_tokens(seed, number, each.input, vocab)) for number, each in enumerate(asked)]
    _warm_up(engine, asked)
    preempted, scheduler, before = engine.scheduler.preemptions, engine.scheduler, engine.stats()
    scheduler.did = SchedulerCounters()
    coming = deque(enumerate(asked))
    under_way: dict[str, float] = {}
    first: dict[str, float] = {}
    made: list[RequestTimes] = []
    failed, concurrency = 0, 0 if serve.rate else serve.concurrency
    start, now = time.perf_counter(), 0.0
    while coming or under_way:
        now = time.perf_counter() - start
        while coming and (len(under_way) < concurrency if concurrency else coming[0][1].due <= now):
            number, request = coming.popleft()
            try:
                engine.add(Request(str(number), prompts[number], request.output, sampling, ignore_end=True))
            except UserError:
                failed += 1
                continue
            under_way[str(number)] = now if concurrency else request.due
        if engine.idle:
            if coming and not concurrency:
                time.sleep(max(0.0, coming[0][1].due - now))
            continue
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            name = output.request
            first.setdefault(name, now)
            if output.finish:
                each, due = asked[int(name)], under_way.pop(name)
                began = first[name] - due
                tpot = (now - first[name]) / (each.output - 1) * 1e3 if each.output > 1 else None
                made.append(RequestTimes(due, 0.0, began * 1e3, tpot, (now - due) * 1e3, each.input, each.output))
        if outputs:
            tell(len(made))
    limits = Limits(*(limit or float("inf") for limit in (serve.ttft_ms, serve.tpot_ms)))
    figures = LoadFigures(tuple(made), len(asked), now, limits, {TOO_LONG: failed} if failed else {})
    did = scheduler.did
    engine_did = {
        "steps": did.steps, "preemptions": scheduler.preemptions - preempted, "running": did.most_running, "pages": did.most_pages,
    }  # fmt: skip
    if serve.speculate != "none":
        now_did = engine.stats()
        engine_did |= {
            "drafted": sum(now_did.drafted_at) - sum(before.drafted_at),
            "accepted": sum(now_did.accepted_at) - sum(before.accepted_at),
        }
    return ServedLoad(figures.as_dict(), engine_did, memory_of(engine))


def _warm_up(engine: Engine, asked: Sequence[LoadRequest]) -> None:
    """Run some requests of the same lengths with other tokens, enough that prefills are batched with decoding sequences: kernels
    are compiled or loaded the first time they meet a shape."""
    for number, each in enumerate(asked[:WARM]):
        prompt = tuple(prompt_tokens(-1, number, each.input, engine.vocab))
        if not engine.scheduler.reasons(len(prompt), min(each.output, 4)):
            engine.add(Request(f"warm {number}", prompt, min(each.output, 4), Sampling(TEMPERATURE), ignore_end=True))
    while not engine.idle:
        engine.step()


def own_runner(engine: Engine) -> Runner:
    """The runner of an engine on one device."""
    assert isinstance(engine.runner, Runner)
    return engine.runner


def memory_of(engine: Engine) -> dict[str, float]:
    """Bytes by owner, under the plan's names; on a GPU also all memory taken on the device."""
    runner = own_runner(engine)
    pages = sum(each.nbytes for each in runner.cache.tensors())
    found: dict[str, float] = {"weights": stored_bytes(runner.model), "pages": engine.pool.pages}
    if isinstance(engine.drafter, DraftModel):
        pages += sum(each.nbytes for each in engine.drafter.runner.cache.tensors())
        found["draft_weights"] = stored_bytes(engine.drafter.runner.model)
    found["kv_cache"] = pages
    if runner.gpu:
        free, total = torch.cuda.mem_get_info(runner.device)
        found |= {"total": total - free}
    return found
