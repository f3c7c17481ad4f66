"""The submitted jobs of a run: a small record in its folder, and the scheduler's own commands to submit, follow and cancel jobs."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from shardwise.files import write_atomically
from shardwise.run import Problem, UserError

FOLDER = "launch"
RECORD = "submitted.json"


@dataclass(frozen=True)
class Submission:
    """A job that a scheduler has accepted."""

    on: str
    id: str
    """Slurm's job number, or the name of the Kubernetes object."""
    file: str
    submitted: str
    log: str = ""
    kind: str = ""
    namespace: str = ""


def record_path(folder: Path) -> Path:
    """The file in a run folder that records its submitted jobs."""
    return folder / FOLDER / RECORD


def submissions(folder: Path) -> list[Submission]:
    """All jobs submitted from a run folder, oldest first."""
    path = record_path(folder)
    try:
        return [Submission(**each) for each in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError):
        raise UserError(
            Problem("is not a record of submitted jobs; remove it to begin anew", where=str(path))
        ) from None


def last(folder: Path) -> Submission:
    """The last submitted job; raises a `UserError` if there is none."""
    found = submissions(folder)
    if not found:
        raise UserError(
            Problem("nothing was submitted from here; `shardwise launch RUN --on … --submit` does", where=str(folder))
        )
    return found[-1]


def submit(on: str, file: Path, folder: Path, *, log: str = "", kind: str = "", namespace: str = "") -> Submission:
    """Submit the file to the scheduler and record the job."""
    if on == "slurm":
        number = _call(["sbatch", "--parsable", str(file)]).strip().partition(";")[0]
        found = Submission(on, number, str(file), _now(), log.replace("%j", number))
    else:
        said = _call(["kubectl", "apply", *_in(namespace), "-f", str(file), "-o", "name"]).strip()
        found = Submission(on, said.rpartition("/")[2], str(file), _now(), kind=kind, namespace=namespace)
    record_path(folder).parent.mkdir(parents=True, exist_ok=True)
    every = [asdict(each) for each in (*submissions(folder), found)]
    write_atomically(record_path(folder), (json.dumps(every, indent=1) + "\n").encode())
    return found


def status(job: Submission) -> str:
    """The job's status at the scheduler, in one line."""
    if job.on == "slurm":
        said = _call(["scontrol", "show", "job", job.id], "is known to Slurm no more; `sacct -j` may still have it")
        found = dict(re.findall(r"(\w+)=(\S+)", said.partition("\n\n")[0]))
        parts = [f"job {job.id}: {found.get('JobState', 'unknown').lower()}"]
        parts += [f"waits for {found.get('Reason')}"] * (found.get("Reason", "None") != "None")
        parts += [f"on {found.get('NodeList')}"] * (found.get("NodeList", "(null)") != "(null)")
        parts += [f"{found.get('RunTime')} of {found.get('TimeLimit')}"] * ("RunTime" in found and "TimeLimit" in found)
        parts += [f"requeued {found.get('Restarts')} times"] * (found.get("Restarts", "0") != "0")
        return ", ".join(parts)
    said = json.loads(_call(["kubectl", "get", job.kind, job.id, *_in(job.namespace), "-o", "json"]))
    conditions = [c["type"] for c in said.get("status", {}).get("conditions", []) if c.get("status") == "True"]
    restarts = said.get("status", {}).get("restarts", 0)
    return (
        f"{job.kind} {job.id}: {', '.join(conditions).lower() or 'running'}"
        + f", restarted {restarts} times" * bool(restarts)
    )


def cancel(job: Submission) -> str:
    """Cancel the job; returns a message."""
    if job.on == "slurm":
        _call(["scancel", job.id])
    else:
        _call(["kubectl", "delete", job.kind, job.id, *_in(job.namespace), "--wait=false"])
    return f"cancelled {job.id}; submit it again to resume from the last checkpoint"


def logs(job: Submission, lines: int) -> str:
    """The last lines of the job's output."""
    if job.on == "slurm":
        try:
            return "\n".join(Path(job.log).read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            raise UserError(Problem("is not there yet: the job has not started", where=job.log)) from None
    pod = f"jobset.sigs.k8s.io/jobset-name={job.id},batch.kubernetes.io/job-completion-index=0"
    return _call(["kubectl", "logs", *_in(job.namespace), f"--selector={pod}", f"--tail={lines}"]).rstrip("\n")


def _in(namespace: str) -> list[str]:
    return [f"--namespace={namespace}"] if namespace else []


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _call(command: Sequence[str], otherwise: str = "") -> str:
    """The output of a scheduler's command; its error becomes a `UserError`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        reason = f"there is no {command[0]} here: run this on a machine of the cluster, or take the file there"
        raise UserError(reason) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} did not answer within two minutes") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(
            f"{command[0]} refused: {said[-1] if said else f'exit code {done.returncode}'}"
            + f"; {otherwise}" * bool(otherwise)
        )
    return done.stdout
