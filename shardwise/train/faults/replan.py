"""Another number of ranks than the layout was made for: the best layout that the planner finds for those there are.

The global batch and the model stay as they are, so the run goes on with the same losses, to rounding. Every machine, and every
rank that another launcher started, comes to the same layout by itself, since a search repeats itself.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from shardwise.run import LayoutConfig, Problem, Run, UserError, to_dict


def fit(run: Run, world: int, nodes: int, chip: str) -> Run:
    """The run on `world` ranks of `nodes` machines: as it is where that fits, replanned where `train.elastic` allows it."""
    if world == run.layout.world:
        return run
    if not run.train.elastic:
        reason = (
            f"needs {run.layout.world} ranks, and {world} are here; train.elastic = true plans another layout for them"
        )
        raise UserError(Problem(reason, key="layout"))
    from shardwise.plan.search import resolve

    cluster = replace(run.cluster, nodes=nodes, devices_per_node=world // nodes, chip=run.cluster.chip or chip)
    found = resolve(replace(run, layout=LayoutConfig(auto=True, fixed=run.layout.fixed), cluster=cluster))
    return replace(found, cluster=replace(found.cluster, chip=run.cluster.chip))


def settle(run: Run, overrides: list[str]) -> Run:
    """The run with its layout searched for where it is `auto`; what was found is said, and added to the overrides that ranks
    are started with."""
    if not run.layout.auto:
        return run
    from shardwise.plan.search import resolve

    run = resolve(run)
    overrides += layout_overrides(run)
    print(f"layout: {layout_words(run)}", file=sys.stderr)
    return run


def layout_overrides(run: Run) -> list[str]:
    """A layout that was searched for, as overrides, so that every rank trains with the same one. All its keys, since those
    with their usual value may be given otherwise in the run's file."""
    values = to_dict(run)
    keys = {f"layout.{k}": v for k, v in values["layout"].items() if k != "fixed"} | {"layout.auto": False}
    keys |= {"train.microbatch": run.train.microbatch}
    keys |= {f"cluster.{k}": values["cluster"][k] for k in ("nodes", "devices_per_node")}
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def layout_words(run: Run) -> str:
    """A layout for people: the axes of more than one rank, the microbatch, and what the search chose besides."""
    usual = LayoutConfig()
    chosen = {k: getattr(run.layout, k) for k in to_dict(run)["layout"] if k not in ("auto", "fixed")}
    words = [f"{k} {v}" for k, v in chosen.items() if v != getattr(usual, k)]
    return ", ".join([*words, f"microbatch {run.train.microbatch}"])
