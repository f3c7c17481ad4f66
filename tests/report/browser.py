"""A page in a real browser: Chromium without a window and without a network. It tells what went wrong and what a script found."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path
from typing import Any

from patience import HANG_SECONDS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

BEFORE = """<script>
window.wrong = [];
addEventListener("error", function (e) { wrong.push(e.message); });
["error", "warn"].forEach(function (kind) { console[kind] = function (text) { wrong.push(String(text)); }; });
</script>"""
AFTER = """<script>
function tell(found) {
  found.wrong = wrong;
  found.fetched = performance.getEntriesByType("resource").map(function (entry) { return entry.name; });
  document.documentElement.dataset.found = JSON.stringify(found);
}
(function () { %s })();
</script>"""


def opened(page: str, script: str) -> dict[str, Any]:
    """Open a page and run a script in it, which ends with `tell({…})`; gives that, what went wrong, and what was fetched."""
    assert CHROMIUM is not None
    watched = page.replace("<head>", "<head>" + BEFORE, 1).replace("</body>", AFTER % script + "</body>", 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(watched, encoding="utf-8")
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--window-size=1366,768",
        ]
        flags += [
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder}/user",
            "--virtual-time-budget=8000",
        ]
        done = subprocess.run(
            [CHROMIUM, *flags, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=HANG_SECONDS
        )
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    return json.loads(unescape(found[1]))
