"""What PyTorch does not promise is used in one file, which says why for each call, and nothing is patched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shardwise"
PRIVATE = re.compile(
    r"torch\._[a-zA-Z]|torch\.\w+\._[a-z]|aten\._flash|_fsdp_|_cdata|_local_tensor|\._version|_opoverload|_unsharded_param|_non_persistent|\._base\b"
)
ELSEWHERE = {
    "model/gemm/accumulate.py": "a pass of the compiler, which it must not load for everybody",
    "cli/machinery/preload.py": "an import for its effect",
}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_calls_stand_in_one_file(path: Path) -> None:
    text = path.read_text()
    assert "unittest" not in text
    assert ".__class__ =" not in text
    if path.name != "torch_private.py" and str(path.relative_to(PACKAGE)) not in ELSEWHERE:
        code = re.sub(r'"""[\s\S]*?"""|#.*', "", text)
        assert not PRIVATE.findall(code)
