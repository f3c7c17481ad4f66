"""`shardwise launch`: writes a scheduler's job for a run, checked against the plan; submits, follows and cancels it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.machinery.options import at_least, new_file, write_file
from shardwise.hardware.chips import unknown_chip
from shardwise.run import Problem, Run, UserError, counted, read_run

if TYPE_CHECKING:
    from shardwise.launch.job import Estimate, Job

HELP = """Write the job that trains a run: a script for sbatch, a JobSet or TrainJob for kubectl, or torchrun lines. Machines and
GPUs follow from the run; memory and time are checked against its plan. --submit submits the job; --status, --logs and --cancel
follow the job that was submitted from the run's folder."""

DEFAULT_LINES = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("run", help="the run, a TOML file; override it with --section.key=value")
    parser.add_argument("--on", choices=("slurm", "kubernetes", "torchrun"), help="what starts the ranks")
    parser.add_argument("--out", type=new_file, metavar="FILE", help="the file to write (default: in the run folder)")
    parser.add_argument("--folder", type=Path, help="the run folder (default: runs/NAME)")
    parser.add_argument("--nodes", type=at_least(1), help="machines (cluster.nodes)")
    parser.add_argument(
        "--ranks-per-node", type=at_least(1), help="ranks, and GPUs, per machine (cluster.devices_per_node)"
    )
    parser.add_argument("--time", help="time limit in Slurm's format: minutes or D-HH:MM:SS (default: from the plan)")
    parser.add_argument("--image", default="", help="container image that contains shardwise (Slurm: with pyxis)")
    parser.add_argument(
        "--mount", action="append", default=[], metavar="HERE:THERE", help="Slurm: mount into the container"
    )
    parser.add_argument(
        "--command", metavar="WORDS", help="how to call shardwise there (default: as here; with an image: shardwise)"
    )
    parser.add_argument("--cpus-per-rank", type=at_least(1), default=0, help="CPU cores per rank")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable for the ranks; may be repeated",
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="=--WORD", help="Slurm: one more option of sbatch"
    )
    parser.add_argument("--hosts", help="torchrun: the machines, a,b,c")
    parser.add_argument(
        "--kind", choices=("jobset", "trainjob"), default="jobset", help="Kubernetes: the kind of object"
    )
    parser.add_argument(
        "--volume", metavar="CLAIM:PATH", help="Kubernetes: volume claim for run folders, and where it is mounted"
    )
    parser.add_argument("--namespace", default="", help="Kubernetes: namespace")
    parser.add_argument("--queue", default="", help="Kubernetes: Kueue's local queue")
    parser.add_argument("--anyway", action="store_true", help="write the job even if the run does not fit by its plan")
    parser.add_argument("--submit", action="store_true", help="submit the job to the scheduler")
    follow = parser.add_mutually_exclusive_group()
    follow.add_argument("--status", action="store_true", help="show the state of the last submitted job")
    follow.add_argument("--logs", action="store_true", help=f"show the last {DEFAULT_LINES} lines of its output")
    follow.add_argument("--cancel", action="store_true", help="cancel it")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    """Write, submit or follow the job."""
    for key, value in (("nodes", args.nodes), ("devices_per_node", args.ranks_per_node)):
        args.overrides += [f"cluster.{key}={value}"] if value else []
    run = read_run(args.run, args.overrides, (unknown_chip,))
    folder = (args.folder or Path("runs") / run.name).resolve()
    if args.status or args.logs or args.cancel:
        return _follow(args, run, folder)
    _check(args)
    from shardwise.train.processes.launch import resolve_layout

    run = resolve_layout(run, args.overrides)
    if args.on != "kubernetes" and run.cluster.rendezvous:  # it is for machines that start their ranks themselves
        args.overrides.append("cluster.rendezvous=")
    _check_starter(run, args.on)
    job, estimate = _job(run, folder, args)
    file = Path(args.out).resolve() if args.out else folder / "launch" / _FILES[args.on]
    # Slurm opens the log before the run creates its folder.
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, _text(job, args).encode())
    said: dict[str, Any] = dict(
        file=str(file), folder=str(folder), nodes=job.nodes, ranks_per_node=job.ranks_per_node,
        time_limit_seconds=job.limit or None, notes=job.notes, expected_seconds=estimate.expected if estimate else None,
    )  # fmt: skip
    if args.submit:
        from shardwise.launch import slurm, submission

        log = slurm.log_file(job) if args.on == "slurm" else ""
        taken = submission.submit(args.on, file, folder, log=log, kind=args.kind, namespace=args.namespace)
        said["id"] = taken.id
    if args.json:
        print(json.dumps(said))
        return 0
    for note in job.notes:
        print(note)
    print(f"wrote {file}")
    if args.submit:
        print(f"submitted as {said['id']}; follow it with --status and --logs, end it with --cancel")
    return 0


_FILES = {"slurm": "job.sbatch", "kubernetes": "job.yaml", "torchrun": "job.sh"}


def _check(args: argparse.Namespace) -> None:
    """Report everything wrong with the command before anything is planned."""
    problems = []

    def wrong(what: str, option: str) -> None:
        problems.append(Problem(what, option, "command line"))

    if args.on is None:
        wrong("say who starts the ranks: slurm, kubernetes or torchrun (or --status, --logs, --cancel)", "--on")
    for option, given, on in (
        ("--mount", args.mount, "slurm"),
        ("--option", args.option, "slurm"),
        ("--hosts", args.hosts, "torchrun"),
        ("--volume", args.volume, "kubernetes"),
        ("--namespace", args.namespace, "kubernetes"),
        ("--queue", args.queue, "kubernetes"),
    ):
        if given and args.on not in (on, None):
            wrong(f"is for --on {on}", option)
    if args.on == "torchrun" and args.submit:
        wrong("torchrun has no queue: run the file that is written", "--submit")
    if args.on == "torchrun" and args.image:
        wrong("torchrun starts no containers: run the lines inside of them", "--image")
    if args.on == "torchrun" and args.command and not re.search(r"\S\s+-m\s+shardwise\s*$", args.command):
        wrong(
            f'"{args.command}" must end in -m shardwise, as in python -m shardwise: torchrun starts a module',
            "--command",
        )
    try:
        shlex.split(args.command or "")
    except ValueError:
        wrong(f"{args.command} has an open quotation", "--command")
    for text in args.env:
        if not re.match(r"[A-Za-z_]\w*=", text):
            wrong(f'"{text}" is not NAME=VALUE', "--env")
    for text in args.option:
        if not text.startswith("-") or "\n" in text:
            wrong(f'"{text}" is no option of sbatch, such as --partition=gpu', "--option")
    if args.volume and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?:/\S*", args.volume):
        wrong(f'"{args.volume}" is not CLAIM:/PATH', "--volume")
    if args.namespace and not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", args.namespace):
        wrong(f'"{args.namespace}" is no name of a namespace', "--namespace")
    if any(c in args.image for c in " \n\t'\""):
        wrong(f'"{args.image}" is no name of an image', "--image")
    if problems:
        raise UserError(*problems)


def _check_starter(run: Run, on: str) -> None:
    """Refuse a run that each rank would refuse, because of who starts the ranks. Kubernetes starts `shardwise train`, which starts
    them."""
    from shardwise.train.processes.environment import RankEnvironment
    from shardwise.train.processes.launch import check_world

    launcher = {"slurm": "srun", "torchrun": "torchrun"}.get(on)
    if launcher:
        check_world(run, RankEnvironment(0, run.layout.world, 0, "", 0, launcher=launcher))


def _job(run: Run, folder: Path, args: argparse.Namespace) -> tuple[Job, Estimate | None]:
    """The job, and its planned estimate."""
    from shardwise import __version__
    from shardwise.launch.job import Job, estimate, parse_time, scheduler_name
    from shardwise.run.derive import planned_on_gpu

    limit = parse_time(args.time) if args.time else 0
    found = estimate(run)
    if found and not found.fits:
        problem = Problem(
            f"{found.memory}; --anyway launches it all the same, `shardwise plan` shows what fits", "layout"
        )
        if not args.anyway:
            raise UserError(problem)
        print(f"warning: {problem}", file=sys.stderr)
    if not found:
        device = "" if planned_on_gpu(run) else " and no GPUs are asked for"
        warn = f"cluster.chip is not set, so neither memory nor time was checked{device * (run.train.device != 'cpu')}"
        print(f"warning: {warn}", file=sys.stderr)
    image = args.image
    if args.on == "kubernetes" and not image:
        image = f"shardwise:{__version__}"
        print(f"warning: no --image: the file names {image}, which has to be there", file=sys.stderr)
    if args.on == "kubernetes" and not args.volume:
        print("warning: no --volume CLAIM:PATH: checkpoints are lost with their pods", file=sys.stderr)
    command = tuple(shlex.split(args.command)) if args.command else ()
    command = command or (("shardwise",) if image else (sys.executable, "-m", "shardwise"))
    # Kubernetes needs no time limit; for Slurm it is the planned time.
    asked = limit or (found.limit if found and args.on == "slurm" else 0)
    job = Job(
        run=run,
        name=scheduler_name(run.name),
        run_file=Path(args.run).resolve(),
        folder=folder,
        work=Path.cwd(),
        command=command,
        overrides=tuple(f"--{override}" for override in args.overrides),
        limit=asked,
        image=image,
        mounts=tuple(args.mount),
        cpus_per_rank=args.cpus_per_rank,
        environment=dict(text.split("=", 1) for text in args.env),
        options=tuple(args.option),
        notes=tuple(_notes(run, found, asked)),
    )
    return job, found


def _notes(run: Run, found: Estimate | None, asked: int) -> list[str]:
    """The plan in a few lines."""
    from shardwise.launch.job import requeues, time_text
    from shardwise.report import words
    from shardwise.train.processes.launch import describe_layout

    cluster = run.cluster
    machines = f"{counted(cluster.nodes, 'machine')} x {cluster.devices_per_node} {cluster.chip or 'ranks'}"
    lines = [f"{run.name}: {machines}, {describe_layout(run)}"]
    if found is None:
        return lines
    step = f"{words.seconds(found.step_seconds)} a step, {words.seconds(found.expected)} for {counted(run.train.steps, 'step')}"
    lines.append(f"planned: {found.memory}; {step}, start-up included")
    again = requeues(found.limit, cluster.restart_seconds, asked) if asked and asked < found.limit else 0
    if asked:
        more = f"; it will be requeued about {counted(again, 'time')}" if again else ""
        lines.append(f"time limit: {time_text(asked)}{more}")
    if again and not run.train.checkpoint_every:
        lines.append("train.checkpoint_every is 0: a machine that is lost takes all steps since the last start with it")
    return lines


def _text(job: Job, args: argparse.Namespace) -> str:
    from shardwise.launch import kubernetes, slurm, torchrun

    if args.on == "slurm":
        return slurm.script(job)
    if args.on == "torchrun":
        hosts = args.hosts.split(",") if args.hosts else ["localhost"]
        if len(hosts) != job.nodes or not all(re.fullmatch(r"[\w.:-]+", host) for host in hosts):
            reason = f'"{args.hosts or ""}" must name the {counted(job.nodes, "machine")} of the run, as in a,b,c'
            raise UserError(Problem(reason, "--hosts", "command line"))
        return torchrun.script(job, hosts)
    claim, _, place = (args.volume or "").partition(":")
    cluster = kubernetes.Cluster(claim, place.rstrip("/") or kubernetes.PLACE, args.namespace, args.queue)
    make = kubernetes.jobset if args.kind == "jobset" else kubernetes.trainjob
    return kubernetes.text(make(job, cluster), job.notes)


def _follow(args: argparse.Namespace, run: Run, folder: Path) -> int:
    """Follow the job that was submitted last from this folder: status, logs or cancel."""
    from shardwise.launch import submission

    job = submission.last(folder)
    if args.cancel:
        said = submission.cancel(job)
    elif args.logs:
        said = submission.logs(job, DEFAULT_LINES)
    else:
        said = submission.status(job)
        step = _last_step(folder)
        said += f"; step {step} of {run.train.steps}" if step else ""
    print(json.dumps({"id": job.id, "on": job.on, "said": said}) if args.json else said)
    return 0


def _last_step(folder: Path) -> int:
    """The last step in a run's metrics, 0 if there is none."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            found = re.findall(rb'"step": ?(\d+)', file.read())
    except OSError:
        return 0
    return int(found[-1]) if found else 0
