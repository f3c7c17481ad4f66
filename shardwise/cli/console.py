"""The terminal that verbs print to."""

from __future__ import annotations

from rich import console


class Console(console.Console):
    """Rich's, to which nobody listening any more is a failure; to `main` it is not."""

    def on_broken_pipe(self) -> None:
        """Say so to whoever called."""
        raise BrokenPipeError
