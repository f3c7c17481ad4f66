"""Versions of the relevant packages, read from their metadata without importing them."""

from __future__ import annotations

import importlib.util
import platform
import re
from importlib import metadata
from pathlib import Path

from shardwise import __version__
from shardwise.run.problems import EXTRA_OF

PACKAGES = ("numpy", "rich", *EXTRA_OF, "triton", "transformers", "pandas")


def package_versions() -> dict[str, str]:
    """Versions of the packages that this one may use; "" for one that is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def torch_built_for() -> str:
    """The platform that PyTorch was built for: "CUDA 13.0", "ROCm 7.1" or "CPUs"; empty without PyTorch. It is read from PyTorch's
    version file, since importing it takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return ""
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    for name, word in (("cuda", "CUDA"), ("hip", "ROCm")):
        if said := re.search(rf"^{name}\b[^=]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE):
            return f"{word} {said[1]}"
    return "CPUs"


def version_lines() -> list[str]:
    """The output of `shardwise --version`."""
    versions = package_versions()
    torch = f"torch {versions['torch']} for {torch_built_for()}" if versions["torch"] else "no torch"
    others = [f"{name} {versions[name]}" for name in ("triton", "numpy") if versions[name]]
    system = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return [f"shardwise {__version__}", ", ".join([torch, *others, system])]
