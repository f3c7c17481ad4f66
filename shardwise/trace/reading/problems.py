"""What is wrong with a profile, told shortly: each kind of problem once, with how often it came and where it came first."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Problems:
    """Collects problems of one file."""

    path: str
    _sentences: list[str] = field(default_factory=list)
    _counted: dict[str, list[int]] = field(default_factory=dict)

    def say(self, sentence: str) -> None:
        """One thing about the file as a whole."""
        self._sentences.append(f"{self.path}: {sentence}")

    def count(self, what: str, position: int, times: int = 1) -> None:
        """Something about events: `what` follows the number of them, as in "3 events have no name"."""
        if times:
            self._counted.setdefault(what, [0, position])[0] += times

    def absorb(self, later: Problems) -> None:
        """Add what is said of a later part of the same file."""
        self._sentences += later._sentences
        for what, (times, first) in later._counted.items():
            self.count(what, first, times)

    def sentences(self) -> tuple[str, ...]:
        """All of it, for people."""
        counted = (
            f"{self.path}: {count} event{'' if count == 1 else 's'} {what}; the first at or after byte {first} of the text"
            for what, (count, first) in self._counted.items()
        )
        return (*self._sentences, *counted)
