"""What makes two runs the same job, so that one may go on from the other's checkpoint: the network, the data and its order, and the
optimizer whose state was saved. The rest may change: the layout, how long to train, learning rates, what is recorded and kept.
"""

from __future__ import annotations

from pathlib import Path

from shardwise.model.weights import RUN_FILE
from shardwise.run import Problem, Run, UserError, read_run, to_dict

# Which samples a step sees follows from these and the step's number; which sets they name is told by their fingerprint.
_FIXED = {
    "data": ("weights", "holdout", "separate_documents"),
    "train": ("seq_len", "global_batch", "seed", "optimizer"),
}


def differences(before: Run, now: Run) -> list[str]:
    """All keys that make them different jobs, as `section.key: before -> now`."""
    fixed = [(section, key) for section, fixed in _FIXED.items() for key in fixed]
    return model_differences(before, now) + _changed(before, now, fixed)


def model_differences(before: Run, now: Run) -> list[str]:
    """The same of the network alone."""
    return _changed(before, now, [("model", key) for key in to_dict(now)["model"] if key != "preset"])


def _changed(before: Run, now: Run, keys: list[tuple[str, str]]) -> list[str]:
    old, new = to_dict(before), to_dict(now)
    return [f"{s}.{k}: {old[s][k]!r} -> {new[s][k]!r}" for s, k in keys if old[s][k] != new[s][k]]


def check_same_job(checkpoint: Path, run: Run) -> None:
    """Refuse to go on from a checkpoint of another job, with all that differs."""
    changed = differences(read_run(checkpoint / RUN_FILE), run)
    if changed:
        reason = f"holds another job: {'; '.join(changed)}. Give --out another folder, or restore these keys"
        raise UserError(Problem(reason, where=str(checkpoint)))


def check_same_data(checkpoint: Path, before: object, now: str) -> None:
    """Refuse data with other tokens in it."""
    if before != now:
        reason = "was trained on other data than the run now names (or the built-in corpus of another Python version)"
        raise UserError(Problem(reason, key="data.sets", where=str(checkpoint)))
