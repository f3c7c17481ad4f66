"""`shardwise scale ladder`: writes, trains and fits small runs that predict a large one."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shardwise.cli.machinery.options import write_file
from shardwise.hardware.chips import unknown_chip
from shardwise.launch.slurm import TASK, array_script
from shardwise.plan.budget.ladder import Rung, make_ladder, rung_of
from shardwise.report import words
from shardwise.run import Problem, UserError, read_run, to_toml
from shardwise.run.derive import planned_on_gpu
from shardwise.scale.fit import fit, predict
from shardwise.scale.runs import is_run_folder, read_runs
from shardwise.scale.store import to_json

MOST_RUNGS = 100


def ladder(args: argparse.Namespace) -> int:
    """Write the runs; with --train, train them, fit, and predict the target."""
    if args.rungs > MOST_RUNGS:
        raise UserError(Problem(f"{args.rungs} must be at most {MOST_RUNGS}", "--rungs", "command line"))
    target = read_run(args.run, args.overrides, (unknown_chip,))
    goal = rung_of(target)
    flops = args.budget * goal.flops if args.budget <= 1 else args.budget
    rungs = make_ladder(target, flops, args.rungs)
    folder = Path(args.out or f"runs/{target.name}-ladder")
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{rung.run.name}.toml" for rung in rungs]
    for path, rung in zip(files, rungs, strict=True):
        write_file(path, to_toml(rung.run).encode())
    if args.slurm:
        (folder / "logs").mkdir(exist_ok=True)  # Slurm does not create the folders of its tasks' output
        write_file(folder / "ladder.sbatch", _array(folder, rungs).encode())
    seconds = None
    if args.train:
        began = time.monotonic()
        for path, rung in zip(files, rungs, strict=True):
            _train(path, folder / rung.run.name, rung)
        seconds = time.monotonic() - began
    found: dict[str, Any] = dict(
        target=dict(name=target.name, params=goal.params, tokens=goal.tokens, flops=goal.flops),
        rungs=[_figures(rung, path, folder) for rung, path in zip(rungs, files, strict=True)],
        flops=sum(rung.flops for rung in rungs), share=sum(rung.flops for rung in rungs) / goal.flops, seconds=seconds,
    )  # fmt: skip
    folders = [folder / rung.run.name for rung in rungs]
    if all(map(is_run_folder, folders)):
        fitted = fit(read_runs(folders), ("power",))
        said = predict(fitted, goal.params, goal.tokens)
        write_file(
            folder / "fit.json", json.dumps(to_json(fitted, dict(folders=[str(each) for each in folders]))).encode()
        )
        found["prediction"] = dict(loss=said.loss, low=said.low, high=said.high, fit=str(folder / "fit.json"))
    print(json.dumps(found) if args.json else "\n".join(_lines(found, folder, args)))
    return 0


def _figures(rung: Rung, path: Path, folder: Path) -> dict[str, Any]:
    train, model = rung.run.train, rung.run.model
    figures: dict[str, Any] = dict(
        name=rung.run.name, file=str(path), params=rung.params, tokens=rung.tokens, flops=rung.flops, layers=model.layers,
        hidden=model.hidden, steps=train.steps, global_batch=train.global_batch, lr=train.lr, days=None, cost=None, loss=None,
    )  # fmt: skip
    if rung.run.cluster.chip and not rung.run.layout.auto:
        from shardwise.plan.plan import plan

        planned = plan(read_run(path, (), (unknown_chip,)))  # the rung as it is trained, with its microbatch
        figures |= dict(days=planned.cost.days, cost=planned.cost.usd)
    if is_run_folder(folder / rung.run.name):
        figures["loss"] = float(read_runs([folder / rung.run.name]).loss[0])
    return figures


def _train(path: Path, out: Path, rung: Rung) -> None:
    """Train one rung in a separate process; a finished one returns at once."""
    print(
        f"training {rung.run.name}: {words.count(rung.params)} parameters, {rung.run.train.steps:,} steps",
        file=sys.stderr,
    )
    command = [sys.executable, "-m", "shardwise", "train", str(path), "--out", str(out)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, env=os.environ, check=False)
    if done.returncode:
        raise UserError(
            Problem(f"training ended with exit code {done.returncode}; the same command resumes", where=str(path))
        )


def _array(folder: Path, rungs: list[Rung]) -> str:
    """A Slurm array with a task for each rung; every rung has the target's layout."""
    place = shlex.quote(str(folder.resolve()))
    commands = [
        f"names=({' '.join(rung.run.name for rung in rungs)})",
        f'name="${{names[{TASK}]}}"',
        f'srun {shlex.quote(sys.executable)} -m shardwise train {place}/"$name".toml --out {place}/"$name"',
    ]
    run = rungs[0].run
    ranks = min(run.layout.world, run.cluster.devices_per_node)
    nodes, gpus = -(-run.layout.world // ranks), planned_on_gpu(run)
    return array_script(folder.name, len(rungs), commands, folder, nodes=nodes, ranks=ranks, gpus=gpus)


def _lines(found: dict[str, Any], folder: Path, args: argparse.Namespace) -> list[str]:
    goal = found["target"]
    size = f"{words.count(goal['params'])} parameters, {words.count(goal['tokens'])} tokens"
    lines = [f"{len(found['rungs'])} rungs for {goal['name']} ({size}):"]
    for rung in found["rungs"]:
        loss = "" if rung["loss"] is None else f", loss {rung['loss']:.4f}"
        cost = "" if rung["days"] is None else f", {words.seconds(rung['days'] * 86400)}, {words.price(rung['cost'])}"
        shape = f"{rung['layers']} layers of {rung['hidden']}"
        lines.append(
            f"  {rung['file']}: {words.count(rung['params'])} parameters ({shape}), {words.count(rung['tokens'])} tokens, "
            f"{rung['steps']:,} steps of {rung['global_batch']} sequences, lr {rung['lr']:.2g}{cost}{loss}"
        )
    lines.append(f"together {words.flops(found['flops'])}, {words.percent(found['share'])} of the target's")
    if "prediction" in found:
        said = found["prediction"]
        lines.append(
            f"{goal['name']} will reach {said['loss']:.4f}, 90% between {said['low']:.4f} and {said['high']:.4f}"
        )
        lines.append(f"wrote {said['fit']}")
    elif args.slurm:
        lines.append(f"sbatch {folder / 'ladder.sbatch'}, then the same command again")
    else:
        lines.append("--train makes them, one after another; --slurm writes them as an array")
    return lines
