"""What a campaign has done, in a file with a line of JSON for each case: it may be stopped at any moment and go on where it was, or
be done in pieces on several machines, whose files are then joined with `cat`."""

from __future__ import annotations

import json
from pathlib import Path

Key = tuple[str | int, ...]
"""Which case: what a campaign calls it."""


class Recorded:
    """The cases of one seed in a file, or nowhere."""

    def __init__(self, path: Path | None, seed: int) -> None:
        self.path, self.seed = path, seed
        self.said: dict[Key, str] = {}
        """What came of each case; of one that is there twice, the last time."""
        for line in path.read_text().splitlines() if path is not None and path.exists() else []:
            try:
                each = json.loads(line)
            except json.JSONDecodeError:
                continue  # a kill cut it short: that case is compared again
            if each["seed"] == seed:
                self.said[tuple(each["case"])] = each["said"]

    def add(self, case: Key, said: str) -> None:
        """One more, on disk before the next."""
        self.said[case] = said
        if self.path is not None:
            with self.path.open("a+b") as file:
                file.seek(max(0, file.seek(0, 2) - 1))
                whole = file.read() in (b"", b"\n")
                line = json.dumps(dict(seed=self.seed, case=case, said=said), ensure_ascii=False)
                file.write((("" if whole else "\n") + line + "\n").encode())
