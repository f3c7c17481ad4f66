"""vLLM's own OpenAI server with made-up weights, as the peer of `http_load.py`, where there is no package index.

    python3 benchmarks/gpu/vllm_server.py PACK llama3-8b PORT

PACK is a folder with vLLM in `site/`, what it needs in `deps/`, and `vllm_gpu.py`, whose import puts stand-ins in the place of
packages that are not there. Two of them the server calls while it starts, so theirs have to do what is expected: hand back what
they are given.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

WORDS = 128256


class Instrumentator:
    """Counts no requests."""

    def __init__(self, **settings: Any) -> None: ...

    def add(self, *_: Any) -> Instrumentator:
        return self

    def instrument(self, *_: Any, **__: Any) -> Instrumentator:
        return self

    def expose(self, *_: Any, **__: Any) -> Instrumentator:
        return self


class Unchanged(ModuleType):
    """A module whose functions give back what they get, also as decorators."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **_: given[0] if given and callable(given[0]) else lambda function: function


def stand_in() -> None:
    """For what is not installed."""
    if importlib.util.find_spec("prometheus_fastapi_instrumentator") is None:
        metrics = ModuleType("prometheus_fastapi_instrumentator")
        metrics.Instrumentator = Instrumentator  # type: ignore[attr-defined]
        sys.modules[metrics.__name__] = metrics
    if importlib.util.find_spec("model_hosting_container_standards") is None:
        for name in ("", ".sagemaker", ".common", ".logging_config"):
            whole = f"model_hosting_container_standards{name}"
            sys.modules[whole] = Unchanged(whole)
        sys.modules["model_hosting_container_standards"].sagemaker = sys.modules[  # type: ignore[attr-defined]
            "model_hosting_container_standards.sagemaker"
        ]
    if importlib.util.find_spec("uvloop") is None:
        import asyncio

        loop = ModuleType("uvloop")
        loop.run = asyncio.run  # type: ignore[attr-defined]
        loop.new_event_loop = asyncio.new_event_loop  # type: ignore[attr-defined]
        loop.EventLoopPolicy = asyncio.DefaultEventLoopPolicy  # type: ignore[attr-defined]
        sys.modules["uvloop"] = loop


def model_folder(pack: Path, preset: str) -> Path:
    """A config of the preset, and a tokenizer in which each token is its number."""
    from tokenizers import Tokenizer, models

    shapes = {
        "llama3-8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128, tie_word_embeddings=False),
        "llama3-1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64, tie_word_embeddings=True),
    }  # fmt: skip
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_theta=500000.0, torch_dtype="bfloat16", vocab_size=WORDS, bos_token_id=1, eos_token_id=2, num_attention_heads=32,
        num_key_value_heads=8, **shapes[preset],
    )  # fmt: skip
    folder = pack / f"served-{preset}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    library = Tokenizer(models.WordLevel({f" {n}": n for n in range(WORDS)}, unk_token=" 0"))
    library.save(str(folder / "tokenizer.json"))
    words = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token=" 1", eos_token=" 2", model_max_length=8192)
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


def main() -> None:
    pack, preset, port = Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3]
    (pack / "sitecustomize.py").write_text("import vllm_gpu\n")  # its child processes need the stand-ins too
    sys.path[:0] = paths = [str(pack), str(pack / "site"), str(pack / "deps")]
    os.environ.update(
        PYTHONPATH=os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]), VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
        VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_LOGGING_LEVEL="WARNING", VLLM_PLUGINS="",
    )  # fmt: skip
    stand_in()
    importlib.import_module("vllm_gpu")
    folder = model_folder(pack, preset)
    sys.argv = [
        "api_server", "--model", str(folder), "--served-model-name", preset, "--load-format", "dummy", "--dtype", "bfloat16",
        "--max-model-len", "8192", "--gpu-memory-utilization", "0.9", "--no-enable-prefix-caching", "--max-num-seqs", "256",
        "--host", "127.0.0.1", "--port", port, "--disable-uvicorn-access-log", "--disable-fastapi-docs",
    ]  # fmt: skip
    import runpy

    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
