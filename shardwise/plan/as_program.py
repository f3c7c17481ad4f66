"""Plans a run as another program would run it: the same model, layout, batch and machines; other fusions, overlaps and copies.

`--as torchtitan` names a program; `--as megatron-lm:release=2021-04,attention=unfused` also states facts about it, like the rows of
published measurements (`docs/validation.md`). A fact that is not stated takes the value that was usual for that program at that
time; its other common values shift the prediction and widen its interval.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from shardwise.plan.cost.constants import classes_of, interval
from shardwise.plan.cost.job import job_of
from shardwise.plan.cost.memory import memory
from shardwise.plan.cost.software import ALIASES, FACTS, PROGRAMS, Situation, framework_of_facts, mixture
from shardwise.plan.plan import Plan, plan_job
from shardwise.plan.time.step import prepare, step_time
from shardwise.run import Problem, Run, UserError
from shardwise.run.problems import nearest


def read_program(text: str) -> dict[str, Any]:
    """Parses `NAME` or `NAME:key=value,key=value` into facts; reports all mistakes at once."""
    name, _, rest = text.partition(":")
    name = ALIASES.get(name.lower(), name.lower())
    facts: dict[str, Any] = {"framework": name}
    wrong = []
    if name not in PROGRAMS:
        wrong.append(f'"{name}" is not one of {", ".join(sorted(PROGRAMS))}{nearest(name, PROGRAMS)}')
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        words = FACTS.get(key, ())
        if key not in FACTS:
            wrong.append(f'"{key}" is not a fact about a program: {", ".join(FACTS)}')
        elif words and value not in words:
            wrong.append(f'{key} is "{value}", but has to be one of {", ".join(words)}')
        facts[key] = {"true": True, "false": False}.get(value, value)
    if wrong:
        raise UserError(*(Problem(what, "--as", "command line") for what in wrong))
    return facts


def plan_as(run: Run, facts: dict[str, Any]) -> Plan:
    """The plan of a run as the program described by the facts would run it."""
    own = job_of(run)
    lay = run.layout
    situation = Situation(
        generation=own.cluster.chip.generation,
        experts=bool(run.model.experts),
        expert=lay.expert,
        tensor=lay.tensor,
        data=lay.replicate * lay.shard,
        zero=lay.zero if lay.shard > 1 else 0,
        fp8=own.fp8,
        bf16=own.dtype != "float16",
    )
    declared = framework_of_facts(facts, situation)
    job = replace(own, framework=declared.framework, fp8_gradients=True)
    step = step_time(prepare(job))
    others = [(a.chance, step_time(prepare(replace(job, framework=a.framework)))) for a in declared.alternatives]
    shift, spread = mixture([(chance, math.log(other.seconds / step.seconds)) for chance, other in others])
    grown = math.exp(shift)
    parts = {name: value * grown for name, value in step.breakdown.items()}
    found = plan_job(run, job, replace(step, seconds=step.seconds * grown, breakdown=parts), memory(job))
    width = interval(classes_of(job, known_program=declared.known), len(declared.alternatives), spread)
    assumed = dict.fromkeys(f"not stated of {facts['framework']}: planned with {a.what}" for a in declared.alternatives)
    said = f"planned as {facts['framework']} would run it; FLOPs and traffic are those of this project's trainer"
    total = found.account.step_seconds
    return replace(
        found, low=total * math.exp(-width), high=total * math.exp(width), notes=(*found.notes, said, *assumed)
    )
