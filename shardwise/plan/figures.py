"""The readable form of a plan, for both terminal and web page: the few numbers that matter, a layout on one line, and the columns
of a ranking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.plan.cost.flops import CONVENTION, parameters
from shardwise.plan.cost.job import GIB
from shardwise.plan.plan import Plan, mfu_peak
from shardwise.plan.trainer.budgeted import compare_with_greedy, saved_by_layers
from shardwise.plan.trainer.rank import PlannedRank, first_ranks
from shardwise.report import words
from shardwise.report.pick import Column
from shardwise.run import AXES, counted

if TYPE_CHECKING:
    from shardwise.plan.search import SearchResult


def figures(best: Plan) -> list[tuple[str, str, str]]:
    """The few numbers that matter."""
    account, run, cost = best.account, best.run, best.cost
    network = parameters(run.model)
    size = f"{words.count(network.total)} parameters"
    if network.active != network.total:
        size += f", {words.count(network.active)} active"
    lay = run.layout
    sizes = " × ".join(f"{axis} {getattr(lay, axis)}" for axis in AXES if getattr(lay, axis) > 1) or "one device"
    extra = [f"ZeRO-{lay.zero}"] if lay.shard * lay.context > 1 else []
    if lay.pipeline > 1:
        extra.append(lay.schedule + (f" × {lay.stages_per_rank}" if lay.stages_per_rank > 1 else ""))
    extra.append(f"recompute {lay.recompute}" + (f" of {lay.recompute_budget:g} GiB" if lay.recompute_budget else ""))
    extra.append(f"microbatch {run.train.microbatch} × {run.accumulation}")
    if best.over_network:
        extra.append(f"over the network between machines: {', '.join(best.over_network)}")
    memory = account.memory
    fits = "fits" if best.fits else "DOES NOT FIT"
    chip, peak = best.job.cluster.chip.name, mfu_peak(best.job)
    hourly = f"{words.money(cost.usd_per_hour)} an hour" if cost.usd_per_hour else "no price known: set cluster.price"
    saved = f"a checkpoint every {words.seconds(cost.checkpoint_every_s)}"
    if not run.train.checkpoint_every:
        steps = max(1, round(cost.checkpoint_every_s / account.step_seconds))
        saved = f"with {saved} (train.checkpoint_every = {steps})"
    recomputed = [("recompute", *_rematerialized(best))] if lay.recompute == "optimal" else []
    recomputed += [("budget", *_budgeted(best))] if lay.recompute_budget else []
    return [
        ("model", run.model.preset or "custom", size),
        ("devices", f"{lay.world:,} {chip}", f"{memory.capacity / GIB:.1f} GiB usable on each{_unfilled(best)}"),
        ("layout", sizes, ", ".join(extra)),
        ("memory", f"{memory.peak / GIB:.1f} GiB", f"on the fullest rank: {fits}"),
        *recomputed,
        ("step", words.seconds(account.step_seconds), f"80% interval: {words.seconds(best.low)} to {words.seconds(best.high)}"),
        ("speed", words.rate(account.tokens_per_second, "tokens"), f"{words.count(account.tokens)} tokens a step"),
        ("MFU", words.percent(best.mfu), f"{CONVENTION}; of {peak[0]} of {words.flops(peak[1], 'FLOP/s')}"),
        ("limit", best.binds.partition(":")[0], best.binds.partition(": ")[2]),
        ("job", words.seconds(cost.days * 86400),
         f"{counted(run.train.steps, 'step')}, {words.count(cost.device_hours)} device-hours, "
         f"goodput {words.percent(cost.goodput)}, {cost.failures:.1f} failures expected"),
        ("cost", words.price(cost.usd), f"{hourly}; {words.count(cost.kwh)} kWh; {saved}"),
    ]  # fmt: skip


def _rematerialized(best: Plan) -> tuple[str, str]:
    """Which tensors the first rank rematerializes, and how long recomputing whole layers would take instead."""
    planned = PlannedRank(best.run, 0)
    found, layers = compare_with_greedy(*planned.of_budget), sum(len(stage.layers) for stage in planned.stages)
    which = ", ".join(f"{word} {count}" for word, count in found.layers.items()) or "nothing"
    whole = f"whole layers within the same budget take {words.seconds(found.greedy)}"
    return words.seconds(found.seconds), f"a microbatch, of {counted(layers, 'layer')}: {which}; {whole}"


def _budgeted(best: Plan) -> tuple[str, str]:
    """Bytes that the layers still save, on the rank that saves most, next to the budget; and what else the activations include."""
    lay, kinds = best.run.layout, dict[object, PlannedRank]()
    for place in (PlannedRank(best.run, rank) for rank in first_ranks(best.run)):
        kinds.setdefault(place.kinds, place)
    saved = max(saved_by_layers(*place.of_budget) for place in kinds.values())
    over = saved > lay.recompute_budget * GIB * 1.0001
    limit = f"{'more than' if over else 'of'} a budget of {lay.recompute_budget:g} GiB for a microbatch"
    more = ", and all microbatches in flight" if lay.pipeline > 1 else ""
    return (
        f"{saved / GIB:.1f} GiB",
        f"saved by the layers, {limit}{': nothing more can be recomputed' * over}; activations below also count the loss"
        f"{',' if more else ' and'} the layer being recomputed{more}",
    )


def _unfilled(best: Plan) -> str:
    """A clause for the report where the layout leaves some devices of its machines idle."""
    cluster = best.job.cluster
    usual = cluster.chip.devices_per_node
    if cluster.chip.name == "cpu" or cluster.per_node >= usual:
        return ""
    return f"; {cluster.per_node} of the {usual} in a machine: --layout=auto finds the best layout for all of them"


def ranking_columns(found: SearchResult) -> list[Column]:
    """The columns of a ranking; the number of devices is a column where several numbers were compared."""
    return columns_of(several=len({plan.run.layout.world for plan in found.ranking}) + len(found.without) > 1)


def columns_of(*, several: bool) -> list[Column]:
    """The columns of a ranking, with or without the number of devices."""
    # A narrow terminal leaves out the last ones that are not essential.
    columns = [
        Column("layout", "layout", essential=True),
        Column("step_seconds", "step", words.seconds, "low", essential=True),
        Column("mfu", "MFU", words.percent, "high"),
        Column("memory", "memory", words.size, "low", 2.0**30, essential=True),
        Column("usd", "cost", words.price, "low", essential=True),
        Column("binds", "limited by"),
        Column("tokens_per_s", "tokens/s", words.count, "high"),
        Column("next", "next change", below=True),
    ]
    if several:
        columns.insert(5, Column("usd_per_hour", "an hour", words.price, "low"))
        columns.insert(0, Column("devices", "devices", essential=True))
    return columns


def ranking_rows(plans: Sequence[Plan], changes: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """A row of a ranking for each plan; `changes` says which change would improve each plan most."""
    return [
        dict(
            devices=plan.run.layout.world,
            layout=short_layout(plan),
            step_seconds=plan.account.step_seconds,
            tokens_per_s=plan.account.tokens_per_second,
            mfu=plan.mfu,
            memory=plan.account.memory.peak,
            usd=plan.cost.usd,
            usd_per_hour=plan.cost.usd_per_hour,
            binds=plan.binds.partition(":")[0].removeprefix("traffic of the ").removesuffix(" axis"),
            next=change,
        )
        for plan, change in zip(plans, changes or [""] * len(plans), strict=True)
    ]


def short_layout(plan: Plan) -> str:
    """A layout on one line: sizes above 1, and its options."""
    lay = plan.run.layout
    far = plan.over_network
    parts = [f"{axis[0]}{getattr(lay, axis)}{'*' * (axis in far)}" for axis in AXES if getattr(lay, axis) > 1]
    if lay.shard * lay.context > 1:
        parts.append(f"zero{lay.zero}")
    if lay.pipeline > 1:
        parts.append(lay.schedule + (f"×{lay.stages_per_rank}" if lay.stages_per_rank > 1 else ""))
    if lay.recompute != "none":
        parts.append(f"re-{lay.recompute}")
    if lay.context > 1:
        parts.append(lay.context_method)
    if lay.tensor > 1 and lay.async_tensor:
        parts.append("async")
    return " ".join([*parts, f"mb{plan.run.train.microbatch}"])


LETTERS = (
    "r replicate, s shard, c context, t tensor, p pipeline, e expert, * over the network between machines, "
    "re- recomputed, mb microbatch"
)
