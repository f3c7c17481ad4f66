"""The picture of a profile's page in README and docs: eight ranks of tensor, pipeline and shard on this machine's cores, recorded
by `shardwise profile`, explained by `shardwise trace --html`, and seen by Chromium. `python tests/docs/profile_picture.py` makes it
anew; `--from FOLDER` takes a profile that was recorded before."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "workbench")]

from chromium import browser  # noqa: E402

PICTURE = ROOT / "docs" / "profile.png"
RUN = ROOT / "examples" / "axes.toml"
LAYOUT = (
    "--name=eight",
    "--layout.tensor=2",
    "--layout.pipeline=2",
    "--layout.shard=2",
    "--train.microbatch=1",
    "--cluster.chip=",
)
WIDTH, HEIGHT = 1106, 1530


def recorded(folder: Path) -> Path:
    """A profile of three steps."""
    command = [
        sys.executable,
        "-m",
        "shardwise",
        "profile",
        str(RUN),
        *LAYOUT,
        "--train.device=cpu",
        "--out",
        str(folder / "eight"),
    ]
    subprocess.run(command, check=True, cwd=folder)
    return folder / "eight"


def main() -> None:
    """Record, explain, look."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="profile", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        profile, page = args.profile or recorded(Path(folder)), Path(folder) / "page.html"
        subprocess.run([sys.executable, "-m", "shardwise", "trace", str(profile), "--html", str(page)], check=True)
        with browser() as seen:
            seen.viewport(WIDTH, HEIGHT)
            seen.open(page.as_uri(), "document.readyState === 'complete' && !!document.querySelector('canvas')")
            seen.js("document.documentElement.style.overflow = 'hidden'; dispatchEvent(new Event('resize'))")
            seen.js("new Promise((done) => setTimeout(done, 300))")
            seen.picture(PICTURE)


if __name__ == "__main__":
    main()
