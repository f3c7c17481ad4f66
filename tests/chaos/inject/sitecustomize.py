"""Faults from outside: Python imports this file by itself when the command starts, because the campaign puts its folder on the
path, and it wakes up in every rank that is forked.

It wraps the file operations of the `os` and `io` modules, and the train step, counts them, and at the moment that the plan
names kills the process, stops it, tells it to end, damages a checkpoint, or lets the disk be full, slow or stuck. The trainer
knows nothing of it. The plan is a list of faults, of which only the first one not yet done is awaited; a fault is marked as done
just before it happens, by a file that all ranks see.
"""

from __future__ import annotations

import builtins
import errno
import importlib
import io
import json
import os
import random
import runpy
import signal
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

REAL = {name: getattr(os, name) for name in ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "statvfs")}
REAL_OPEN = io.open
SLOW = ("slow disk", "stuck disk")


class Injector:
    """Awaits the faults of one rank."""

    def __init__(self, folder: str, rank: int) -> None:
        self.folder, self.rank, self.born = folder, rank, time.time()
        self.faults = json.loads(Path(folder, "faults.json").read_text())
        self.checkpoints = self.faults["checkpoints"]
        self.paths: dict[int, str] = {}
        self.armed: dict[str, Any] | None = None
        self.operations = 0
        self.saves = 0
        self.full = False
        self.slow_file = ""
        self.step_seconds = 0.05
        first = self.awaited()
        if first and first["rank"] == rank and first["kind"] == "kill at start":
            threading.Timer(first["delay"], lambda: self.act(first)).start()
        if first and first["rank"] == rank and first["kind"] == "crash at start":
            self.armed = first

    def awaited(self) -> dict[str, Any] | None:
        """The first fault that has not happened yet."""
        done = set(os.listdir(os.path.join(self.folder, "done")))
        last = max((f for f in self.faults["faults"] if str(f["id"]) in done), key=lambda f: f["id"], default=None)
        fatal = last is not None and last["kind"] not in ("full disk", "slow disk", "flip a bit", "truncate")
        if fatal and os.stat(os.path.join(self.folder, "done", str(last["id"]))).st_mtime > self.born:
            return None  # these ranks are doomed already; the next fault is for those that come after them
        return next((f for f in self.faults["faults"] if str(f["id"]) not in done), None)

    def mark(self, fault: dict[str, Any]) -> bool:
        """Note that a fault happens now; False when it already has."""
        path = os.path.join(self.folder, "done", str(fault["id"]))
        try:
            REAL["write"](REAL["open"](path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), b"done")
            return True
        except FileExistsError:
            return False

    def act(self, fault: dict[str, Any]) -> None:
        """Let a fault happen to this process."""
        if not self.mark(fault):
            return
        kind = fault["kind"]
        if kind == "tell to stop":
            os.kill(os.getpid(), signal.SIGTERM)
        elif kind == "halt":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "kill the fork server":
            os.kill(os.getppid(), signal.SIGKILL)
        elif kind == "kill the command":
            status = Path(f"/proc/{os.getppid()}/stat").read_text()
            os.kill(int(status.rpartition(")")[2].split()[1]), signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    # At steps.

    def before_step(self, step: int) -> None:
        """Called ahead of every step."""
        while (fault := self.awaited()) and fault["rank"] == self.rank and step >= fault["step"]:
            kind = fault["kind"]
            if kind in ("flip a bit", "truncate"):
                if not self.damage(fault, step - 1):
                    return  # not until the newest is there, and an older one to fall back to
            elif kind in ("crash while saving", "full disk", "slow disk", "stuck disk"):
                if self.armed is None or self.armed["id"] != fault["id"]:
                    self.armed, self.operations, self.saves = fault, 0, 0
                return
            elif kind in ("kill at start", "crash at start"):
                # It was not the first to be awaited when this process started; the one that the next kill starts will do.
                return
            else:
                threading.Timer(fault["delay"] * self.step_seconds, lambda f=fault: self.act(f)).start()
                return

    def damage(self, fault: dict[str, Any], step: int) -> bool:
        """Truncate a file of the newest checkpoint, or flip one of its bits."""
        whole = sorted(p for p in Path(self.checkpoints).glob("step-*") if p.is_dir())
        expected = step // self.faults["every"] * self.faults["every"]
        if len(whole) < 2 or whole[-1].name < f"step-{expected:08d}":
            return False
        rng = random.Random(fault["seed"])
        files = sorted(p for p in whole[-1].iterdir() if p.stat().st_size)
        path = rng.choice(files)
        content = bytearray(path.read_bytes())
        if fault["kind"] == "truncate":
            del content[rng.randrange(len(content)) :]
        else:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        if not self.mark(fault):
            return True
        with REAL_OPEN(path, "wb") as f:
            f.write(content)
        return True

    # At file operations.

    def inside(self, path: Any, directory: int | None = None) -> str | None:
        """The path, when it lies in the checkpoints of the run."""
        try:
            text = os.fspath(path)
        except TypeError:
            return None
        text = text.decode() if isinstance(text, bytes) else text
        if directory is not None:
            text = os.path.join(self.paths.get(directory, ""), text)
        return text if f"{os.path.basename(os.path.dirname(self.checkpoints))}/checkpoints" in text else None

    def operation(self, name: str, path: str | None, writes: bool = False, torn: Any = None) -> None:
        """Called ahead of every operation in the checkpoints; `torn` does half of it."""
        if path is None:
            return
        fault = self.armed
        if self.faults["count"]:
            with REAL_OPEN(os.path.join(self.folder, f"operations-{self.rank}"), "a") as log:
                log.write(f"{name} {path}\n")
        if fault is None:
            return
        if name == "mkdir" and path.endswith(".partial"):
            self.saves += 1
            self.operations = 0
            self.full = False
            if self.saves > 2:  # saves have fewer operations than was thought: then at the first one
                fault["operation"] = 1
        if not self.saves and fault["kind"] != "crash at start":
            return
        if fault["kind"] in SLOW:
            return
        self.operations += 1
        if fault["kind"] == "full disk":
            if self.operations == fault["operation"] and self.mark(fault):
                self.full = True
            if self.full and writes:
                if torn is not None:
                    torn()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            return
        if self.operations == fault["operation"]:
            if torn is not None and fault["torn"]:
                torn()
            self.act(fault)
            time.sleep(10)  # a signal to oneself may take a moment

    def slowly(self, path: str | None, size: int) -> int:
        """How much of a write to a checkpoint happens at once: a slow disk takes a little, and its time; a stuck one, nothing."""
        fault = self.armed
        if path is None or not path.endswith(".writing") or fault is None or fault["kind"] not in SLOW:
            return size
        if fault["kind"] == "stuck disk":
            self.mark(fault)
            time.sleep(3600)
        if not self.slow_file:
            self.slow_file = path
            self.mark(fault)
        if path != self.slow_file:  # of a later save
            return size
        time.sleep(fault["seconds"])
        return min(size, fault["bytes"])

    def room(self, path: Any) -> Any:
        """What the file system says of itself."""
        found = REAL["statvfs"](path)
        fault = self.armed
        if fault is None or fault["kind"] != "full disk" or fault["operation"] or not self.mark(fault):
            return found
        return os.statvfs_result([*found[:3], 0, 0, *found[5:]])


def wrap(injector: Injector) -> None:
    """Put the injector around the operations that Python code makes files with."""

    def opening(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        inside = injector.inside(path, dir_fd)
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            injector.operation("open", inside, writes=True)
        handle = REAL["open"](path, flags, mode, dir_fd=dir_fd)
        if inside is not None:
            injector.paths[handle] = inside
        else:
            injector.paths.pop(handle, None)
        return handle

    def writing(handle: int, data: Any) -> int:
        half = memoryview(data).cast("B")[: memoryview(data).nbytes // 2]
        injector.operation("write", injector.paths.get(handle), True, lambda: REAL["write"](handle, half))
        count = injector.slowly(injector.paths.get(handle), memoryview(data).nbytes)
        return REAL["write"](handle, memoryview(data).cast("B")[:count])

    def syncing(handle: Any) -> None:
        number = handle if isinstance(handle, int) else handle.fileno()
        injector.operation("fsync", injector.paths.get(number))
        REAL["fsync"](number)

    def renaming(source: Any, target: Any, **keys: Any) -> None:
        injector.operation("rename", injector.inside(target))
        REAL["rename"](source, target, **keys)

    def making(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        injector.operation("mkdir", injector.inside(path, dir_fd), writes=True)
        REAL["mkdir"](path, mode, dir_fd=dir_fd)

    def removing(path: Any, *, dir_fd: int | None = None) -> None:
        injector.operation("unlink", injector.inside(path, dir_fd))
        REAL["unlink"](path, dir_fd=dir_fd)

    def removing_folder(path: Any, *, dir_fd: int | None = None) -> None:
        injector.operation("rmdir", injector.inside(path, dir_fd))
        REAL["rmdir"](path, dir_fd=dir_fd)

    class Written:
        """A file opened for writing, its writes counted."""

        def __init__(self, file: Any, path: str) -> None:
            self.file, self.path = file, path
            injector.paths[file.fileno()] = path

        def write(self, data: Any) -> Any:
            def torn() -> None:
                self.file.write(data[: len(data) // 2])
                self.file.flush()

            injector.operation("write", self.path, True, torn)
            return self.file.write(data)

        def __enter__(self) -> Any:
            self.file.__enter__()
            return self

        def __exit__(self, *exception: Any) -> Any:
            return self.file.__exit__(*exception)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    def opening_file(path: Any, mode: str = "r", *arguments: Any, **keys: Any) -> Any:
        inside = injector.inside(path)
        if inside is None or not set(mode) & set("wax+"):
            return REAL_OPEN(path, mode, *arguments, **keys)
        injector.operation("open", inside, writes=True)
        return Written(REAL_OPEN(path, mode, *arguments, **keys), inside)

    os.open, os.write, os.fsync, os.statvfs = opening, writing, syncing, injector.room
    os.rename = os.replace = renaming
    os.mkdir, os.unlink, os.remove, os.rmdir = making, removing, removing, removing_folder
    io.open = builtins.open = opening_file
    # `shutil.rmtree` looks these up in sets of functions to learn what they can do.
    os.supports_dir_fd |= {os.open, os.unlink, os.rmdir, os.mkdir}


def wrap_step(injector: Injector, module: ModuleType) -> None:
    """Put the injector ahead of every step."""
    step = module.TrainState.train_step

    def train_step(train_state: Any, *arguments: Any, **keys: Any) -> Any:
        injector.before_step(train_state.step + 1)
        start = time.perf_counter()
        result = step(train_state, *arguments, **keys)
        injector.step_seconds = time.perf_counter() - start
        return result

    module.TrainState.train_step = train_step


def forked() -> None:
    """In every process that is forked: a rank has imported everything already, and has its environment when it runs its command."""
    if "CHAOS_FOLDER" not in os.environ:
        return
    run_module = runpy.run_module

    def with_faults(*arguments: Any, **keys: Any) -> dict[str, Any]:
        injector = Injector(os.environ["CHAOS_FOLDER"], int(os.environ["RANK"]))
        wrap(injector)
        wrap_step(injector, importlib.import_module("shardwise.train.step"))
        return run_module(*arguments, **keys)

    runpy.run_module = with_faults


os.register_at_fork(after_in_child=forked)
