"""What PyTorch does not promise is used in one file, which says why for each call, and nothing is patched."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "shardwise"
PRIVATE = re.compile(
    r"torch\._[a-zA-Z]|torch\.\w+\._[a-z]|aten\._flash|_fsdp_|_cdata|_local_tensor|\._version|_opoverload|_unsharded_param|_non_persistent|\._base\b"
)
ELSEWHERE = {
    "model/gemm/accumulate.py": "a pass of the compiler, which it must not load for everybody",
    "model/without_gradient.py": "likewise",
    "train/faults/preload.py": "an import for its effect",
}


def test_private_calls_stand_in_one_file() -> None:
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        text, name = path.read_text(), str(path.relative_to(PACKAGE))
        wrong = [words for words in ("unittest", ".__class__ =") if words in text]
        if not name.startswith("torch_private/") and name not in ELSEWHERE and PRIVATE.search(text):
            wrong += PRIVATE.findall(re.sub(r'"""[\s\S]*?"""|#.*', "", text))
        if wrong:
            found[name] = wrong
    assert not found
