"""The plan of a serving run: the latency and throughput of its load, the memory of a device by owner, and the cost of tokens; for
the given layout, or for the cheapest one that holds the load.

Tensor ranks shard every layer, pipeline stages work on different steps at a time, experts are distributed over ranks; each replica
is an engine of its own, and requests are distributed among the replicas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwise.hardware.engine_facts import EngineFacts
from shardwise.plan.cost.job import cluster_of
from shardwise.plan.serving.drafting import Speculation, tokens_a_step
from shardwise.plan.serving.pool import ServingMemory, draft_run, host_pages, serving_memory
from shardwise.plan.serving.served import ServedLoad
from shardwise.plan.serving.simulate import EngineSize, Simulated, requests_of, simulate, too_many_requests
from shardwise.plan.serving.step_time import StepTime
from shardwise.run import AXES, Problem, Run, UserError
from shardwise.run.load import LoadRequest
from shardwise.run.rules.check import serving_rules
from shardwise.run.second_models.draft import drafts
from shardwise.schedules.serving.figures import LoadFigures, RequestTimes

HOLDS = 0.95
"""A layout holds a load if this share of the requests meets the limits, and this share of the request rate is served."""


@dataclass(frozen=True)
class ServingPlan:
    """The planned figures of a layout."""

    run: Run
    figures: LoadFigures
    memory: ServingMemory
    simulated: tuple[Simulated, ...]
    usd_per_hour: float
    holds: bool
    """Whether requests are served as fast as they arrive, within the limits."""
    facts: EngineFacts
    """The measurements that step times are based on."""

    @property
    def devices(self) -> int:
        """The number of devices of all replicas."""
        return self.run.layout.world

    def as_dict(self) -> dict[str, Any]:
        """For programs: the same keys as a measured load, and memory, layout and cost."""
        found = self.figures.as_dict()
        hours = self.figures.seconds / 3600
        tokens = found["output_tokens"]
        layout = self.run.layout
        speed, error = found["output_tokens_per_s"], self.facts.error
        return found | {
            "holds": self.holds,
            "steps": f"simulated; {self.facts.origin}",
            "interval": {"share": error, "output_tokens_per_s": [speed / (1 + error), speed * (1 + error)]},
            "layout": {"devices": layout.world} | {axis: getattr(layout, axis) for axis in AXES},
            "memory": self.served.memory,
            "engine": self.served.engine,
            "speculation": self._speculation(),
            "cost": {
                "usd_per_hour": self.usd_per_hour,
                "usd_per_million_output_tokens": self.usd_per_hour * hours / tokens * 1e6 if tokens else None,
            },
        }  # fmt: skip

    def _speculation(self) -> dict[str, Any]:
        serve = self.run.serve
        if serve.speculate == "none":
            return {}
        drafts, acceptance = serve.draft_tokens, serve.acceptance
        tokens = tokens_a_step(acceptance, drafts)
        return dict(by=serve.speculate, draft_tokens=drafts, acceptance=acceptance, tokens_a_step=tokens)

    @cached_property
    def served(self) -> ServedLoad:
        """The same record that a measured load has."""
        memory, simulated = self.memory, self.simulated
        owners = {
            "weights": memory.weights, "activations": memory.activations, "libraries": memory.libraries,
            "kv_cache": memory.cache, "pages": memory.pages, "total": memory.total,
        } | ({"draft_weights": memory.draft} if memory.draft else {})  # fmt: skip
        engine = {
            "steps": sum(each.steps for each in simulated), "preemptions": sum(each.preemptions for each in simulated),
            "running": max(each.most_running for each in simulated), "pages": max(each.most_pages for each in simulated),
        }  # fmt: skip
        if self.run.serve.speculate != "none":
            engine |= {name: sum(getattr(each, name) for each in simulated) for name in ("drafted", "accepted")}
        return ServedLoad(self.figures.as_dict(), engine, owners)


def plan_serving(run: Run, over_http: bool = True) -> ServingPlan:
    """Simulates the run's load on its layout, with requests over HTTP or from the engine's own process."""
    cluster = cluster_of(run)
    layout, model, serve = run.layout, run.model, run.serve
    if broken := _broken(run):
        raise UserError(*broken)
    memory = serving_memory(run, cluster.chip)
    if memory.pages < 2:
        raise UserError(
            Problem(
                f"a device's {cluster.chip.memory / 2**30:.0f} GiB leave no room for keys and values", "layout.tensor"
            )
        )
    times, draft = StepTime.of_run(run, cluster, drafts(run)), draft_run(run)
    guessing = None if draft is None else StepTime.of_run(draft, cluster, 1)
    size = EngineSize(memory.pages, host_pages(run, memory), model.max_positions, model.sliding_window)
    arrive = times.facts.profile.serve_arrive if over_http else 0.0
    asked = requests_of(serve, run.train.seed, layout.replicate)
    # A client stays with its replica; with a rate, every request is a client of its own. Replicas without a client do nothing.
    clients = len(asked) if serve.rate else max(1, serve.concurrency)
    replicas = min(layout.replicate, clients, len(asked))
    shares: list[list[LoadRequest]] = [[] for _ in range(replicas)]
    for n, request in enumerate(asked):
        shares[n % clients % layout.replicate].append(request)
    simulated = tuple(
        simulate(
            serve,
            share,
            times,
            size,
            0 if serve.rate else len(range(n, clients, layout.replicate)),
            arrive,
            Speculation.of(serve, guessing, run.train.seed + n),
        )
        for n, share in enumerate(shares)
    )
    errors: Counter[str] = Counter()
    for each in simulated:
        errors.update(each.figures.errors)
    figures = LoadFigures(
        tuple(made for each in simulated for made in each.figures.made),
        sum(each.figures.requests for each in simulated),
        max(each.figures.seconds for each in simulated),
        simulated[0].figures.limits,
        dict(errors),
    )
    price = (run.cluster.price or cluster.chip.price) * layout.world
    return ServingPlan(run, figures, memory, simulated, price, _holds(run, figures), times.facts)


def _broken(run: Run) -> list[Problem]:
    broken = [Problem(rule.reason(), rule.key) for rule in serving_rules(run) if rule.broken]
    too_many = too_many_requests(run.serve, run.layout.replicate)
    return [*broken, too_many] if too_many else broken


def _holds(run: Run, figures: LoadFigures) -> bool:
    found = figures.as_dict()
    pace = _keeps_pace(figures.made) if run.serve.rate else True
    return not found["failed"] and pace and (not figures.limits.given or found["goodput_share"] >= HOLDS)


def _keeps_pace(made: Sequence[RequestTimes]) -> bool:
    """Whether as many requests end as arrive. How long they take does not say: where they pile up, all take longer. So those under
    way when the last one arrives may be more than when half of the time had passed only by the share that need not be served, and
    by two standard deviations of random arrivals."""
    last = max((each.due for each in made), default=0.0)
    half, end = (sum(each.due <= now < each.due + each.e2e / 1e3 for each in made) for now in (last / 2, last))
    arrived = sum(each.due > last / 2 for each in made)
    return end - half <= (1 - HOLDS) * arrived + 2 * math.sqrt(end + half)


def layouts_of(run: Run) -> Iterator[Run]:
    """Layouts on the cluster's devices with the run's fixed keys, the fewest devices first: of replicas the powers of two, and as
    many as there is room for."""
    cluster, lay = cluster_of(run), run.layout
    others = lay.world // (lay.replicate * lay.tensor)
    sizes = [2**n for n in range(cluster.devices.bit_length())]
    tensors = [size for size in sizes if size <= cluster.domain and run.model.heads % size == 0]
    tensors = [lay.tensor] if "tensor" in lay.fixed else tensors

    def replicates(tensor: int) -> set[int]:
        most = cluster.devices // (tensor * others)
        return {lay.replicate} if "replicate" in lay.fixed else {*(size for size in sizes if size < most), most}

    for devices, tensor, replicate in sorted((t * r * others, t, r) for t in tensors for r in replicates(t)):
        if 0 < devices <= cluster.devices:
            layout = replace(lay, auto=False, fixed=(), replicate=replicate, tensor=tensor)
            yield replace(run, layout=layout)


def _replicas_between(plans: list[ServingPlan]) -> Iterator[ServingPlan]:
    """Plans with more replicas than the most that do not hold the load, and fewer than the fewest that do, which halve what is left
    between the two."""
    enough = min((plan.run.layout.replicate for plan in plans if plan.holds), default=0)
    few = max((plan.run.layout.replicate for plan in plans if plan.run.layout.replicate < enough), default=enough)
    while enough - few > 1:
        middle = (few + enough) // 2
        run = plans[0].run
        plan = plan_serving(replace(run, layout=replace(run.layout, replicate=middle)))
        yield plan
        few, enough = (few, middle) if plan.holds else (middle, enough)


def search_serving(run: Run) -> list[ServingPlan]:
    """Plans of all layouts that fit: first those that hold the load, the cheapest first; then the others by throughput."""
    # No layout mends a broken rule of another section.
    if broken := [problem for problem in _broken(run) if not problem.key.startswith("layout.")]:
        raise UserError(*broken)
    candidates = list(layouts_of(run))
    if not candidates:
        raise UserError(
            Problem(f"the given keys need more than the cluster's {cluster_of(run).devices} devices", "layout")
        )
    reasons = [_broken(candidate) for candidate in candidates]
    if all(reasons):
        raise UserError(*reasons[0])
    found: list[ServingPlan] = []
    for candidate in candidates:
        if any(plan.holds and candidate.layout.world > 4 * plan.devices for plan in found):
            break  # more devices hold the load too, but cost more
        try:
            found.append(plan_serving(candidate))
        except UserError:
            continue
    if "replicate" not in run.layout.fixed:
        for tensor in {plan.run.layout.tensor for plan in found}:
            found += _replicas_between([plan for plan in found if plan.run.layout.tensor == tensor])
    if not found:
        raise UserError(Problem("no layout of these devices has room for the weights and a sequence", "cluster.nodes"))

    def rank(plan: ServingPlan) -> tuple[bool, float, float]:
        speed = plan.figures.as_dict()["output_tokens_per_s"]
        return not plan.holds, plan.devices if plan.holds else 0.0, -speed

    return sorted(found, key=rank)
