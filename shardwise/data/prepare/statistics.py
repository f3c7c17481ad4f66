"""The effect of each step on a corpus, summed over the tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.data.prepare.spill import KEPT, KEPT_ROW, READ, READ_ROW, ROWS, read_report, read_rows
from shardwise.data.prepare.stages import Plan, folder_of

_EXAMPLES = 3


def gather(plan: Plan, work: Path) -> dict[str, Any]:
    """For each step, its input in documents and characters, the removed ones by reason with examples, and the changed ones."""
    steps = [_empty(step.kind, step.settings) for step in plan.recipe.steps]
    reading = _empty("read", {})
    documents = kept = characters = 0
    for unit in plan.units:
        for stage in range(len(plan.shuffles) + 1):
            folder = folder_of(work, f"map-{stage}", unit.number)
            report = read_report(folder)
            for step, (count, size) in report["seen"].items():
                steps[int(step)]["documents"] += count
                steps[int(step)]["characters"] += size
            for step, (count, size) in report["changed"].items():
                steps[int(step)]["changed"] += count
                steps[int(step)]["characters_cut"] += size
            for key, (count, size) in report["count"].items():
                number, _, reason = key.partition(":")
                step = reading if int(number) == READ else steps[int(number)]
                entry = step["reasons"].setdefault(reason, {"documents": 0, "characters": 0, "examples": []})
                entry["documents"] += count
                entry["characters"] += size
                step["removed"] += count
                step["characters_removed"] += size
                entry["examples"] = (entry["examples"] + report["examples"][key])[:_EXAMPLES]
        documents += len(read_rows(folder_of(work, "map-0", unit.number), ROWS, READ_ROW))
        last = read_rows(folder_of(work, f"map-{len(plan.shuffles)}", unit.number), KEPT, KEPT_ROW)
        kept += len(last)
        characters += int(last["size"].sum(dtype="int64"))
    reading["documents"] = documents
    for step in (reading, *steps):
        step["reasons"] = dict(sorted(step["reasons"].items(), key=lambda each: (-each[1]["documents"], each[0])))
    return {"documents": documents, "kept": kept, "characters_kept": characters, "steps": [reading, *steps]}


def _empty(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    counts = dict.fromkeys(("documents", "characters", "removed", "characters_removed", "changed", "characters_cut"), 0)
    return {"kind": kind, "settings": settings, **counts, "reasons": {}}
