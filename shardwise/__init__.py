"""Shardwise plans, trains and explains large transformer models from one description of the job.

    import shardwise

    run = shardwise.Run(preset="llama3-70b", layout="auto", chip="h100", nodes=8)
    shardwise.search(run)

`Run`, `plan`, `search`, `train`, `trace`, `serve` and `profile` are here (docs/python.md); importing this package is cheap until
one of them is used.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.api import Run, UserError, plan, profile, search, serve, trace, train

__version__ = "0.2.0"
__all__ = ["Run", "UserError", "__version__", "plan", "profile", "search", "serve", "trace", "train"]
_FOLDERS = ("plan", "serve", "trace", "train")


class VerbFolder(ModuleType):
    """A subpackage with the name of a verb: `from shardwise.plan.plan import Plan` imports from it, and `shardwise.plan(run)`
    plans. The import system binds the subpackage to its name here, so a function cannot keep that name; instead each such
    subpackage's `__init__.py` replaces itself with an instance of this class."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(names["__name__"])
        self.__dict__.update(names)

    def __call__(self, *args: Any, **keys: Any) -> Any:
        from shardwise import api

        return getattr(api, self.__name__.rpartition(".")[2])(*args, **keys)

    @property
    def __wrapped__(self) -> Any:
        """The function, for `help` in notebooks and for `inspect.signature`."""
        from shardwise import api

        return getattr(api, self.__name__.rpartition(".")[2])


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shardwise' has no attribute '{name}'")
    from importlib import import_module

    return import_module(f"shardwise.{name}") if name in _FOLDERS else getattr(import_module("shardwise.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
