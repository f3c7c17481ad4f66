"""One run at a time in a run folder. The operating system keeps the lock (`flock`), for as long as the first rank lives: when it
dies, however it dies, the lock is gone with it, and no file has to be cleaned up or judged stale.

On a file system shared by machines the lock holds between them where the file system carries it, as NFS does. The file's
text, who and since when, is only for the message.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from shardwise.run import Problem, UserError

FILE = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderLock:
    """Holds a run folder from when it is made until it is released. `warning` says when the file system cannot lock."""

    def __init__(self, out: Path) -> None:
        self.warning = ""
        try:
            out.mkdir(parents=True, exist_ok=True)
            self.handle = os.open(out / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as e:
            reason = "is a file, not a folder" if isinstance(e, FileExistsError) else f"cannot be written: {e.strerror}"
            raise UserError(Problem(reason, where=str(out))) from None
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            who = _holder(self.handle)
            if e.errno in _NO_LOCKS:
                self.warning = f"the file system of {out} has no locks; see to it that no other run uses the folder"
            else:
                os.close(self.handle)
                reason = f"is in use by another run{who}; wait for it to end, or give --out another folder"
                raise UserError(Problem(reason, where=str(out))) from None
        note = dict(
            host=socket.gethostname(), process=os.getpid(), since=datetime.now(UTC).isoformat(timespec="seconds")
        )
        os.ftruncate(self.handle, 0)
        os.pwrite(self.handle, (json.dumps(note) + "\n").encode(), 0)

    def release(self) -> None:
        """Let others have the folder. The file stays: removing it could pull it from under who locks it next."""
        os.close(self.handle)


def _holder(handle: int) -> str:
    try:
        note = json.loads(os.pread(handle, 4096, 0))
        return f" (process {note['process']} on {note['host']}, since {note['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
