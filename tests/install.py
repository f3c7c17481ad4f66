"""Install packages beside this interpreter, as pip would:

    .venv/bin/python tests/install.py -r requirements-dev.txt -e '.[dev]'

uv does it, in a fraction of pip's time: pip reads two hundred pages of an index in Python. uv knows nothing of pip's settings, so
they become its options. Where uv is not to be had, lacks a setting or fails, pip does it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OPTIONS = {
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "index-url": "--index-url",
    "trusted-host": "--allow-insecure-host",
}
"""uv's words for settings of pip; each may have several values."""
NO_MATTER = {
    "cert",
    "default-timeout",
    "disable-pip-version-check",
    "no-cache-dir",
    "progress-bar",
    "quiet",
    "retries",
    "timeout",
}
"""Settings that choose no other package. `cert` is an environment variable for uv."""


def settings(listed: str) -> dict[str, str]:
    """What `pip config list` prints, by name. The environment comes before files, of which the last one holds."""
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        found[key.rpartition(".")[2]] = ast.literal_eval(value)
    return found


def options(known: dict[str, str]) -> list[str] | None:
    """The same for uv, which takes the best version of all indexes, as pip does; None where it has no word for one."""
    if known.keys() - OPTIONS.keys() - NO_MATTER:
        return None
    each = [(OPTIONS[name], value) for name in OPTIONS.keys() & known.keys() for value in known[name].split()]
    return ["--index-strategy", "unsafe-best-match", *(word for pair in sorted(each) for word in pair)]


def main(wanted: list[str]) -> int:
    """Install what is wanted."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    known = settings(listed)
    more = options(known)
    there = importlib.util.find_spec("uv") is not None
    if more is not None and (there or subprocess.run([*PIP, "install", "-q", "uv"], check=False).returncode == 0):
        certificates = {"SSL_CERT_FILE": known["cert"]} if "cert" in known else {}
        command = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", sys.executable, *more, *wanted]
        if subprocess.run(command, env=os.environ | certificates, check=False).returncode == 0:
            return 0
        print("uv failed; installing with pip", file=sys.stderr)
    # The pip of an interpreter may be years old, and slow.
    return subprocess.run([*PIP, "install", "-q", "--no-compile", "--upgrade", "pip"], check=False).returncode or (
        subprocess.run([*PIP, "install", "-q", "--no-compile", *wanted], check=False).returncode
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
