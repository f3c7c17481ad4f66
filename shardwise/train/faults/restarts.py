"""How often, and after how long, the ranks of a run that failed are started again.

A failure after a new checkpoint counts as the first: a run that advances may fail as often as it likes. One that fails again and
again without getting to its next checkpoint is not unlucky but broken, and is given up after `train.restarts` tries, each
waiting twice as long as the one before.
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST = 64
"""The wait is never more than so many times the first one."""


@dataclass
class Restarts:
    """Counts failures against a limit."""

    limit: int
    wait: float
    failures: int = 0
    """Since the last new checkpoint."""
    step: int = -1
    """Of the newest checkpoint when the last failure came."""

    def after_failure(self, saved_step: int) -> float | None:
        """Seconds to wait before the next start, or None when there is to be none. `saved_step` is the newest checkpoint's."""
        if saved_step > self.step:
            self.failures = 0
        self.step = saved_step
        self.failures += 1
        if self.failures > self.limit:
            return None
        return self.wait * min(2 ** (self.failures - 1), LONGEST)
