"""A transformer with a given number of parameters, in the proportions of Llama 3."""

from __future__ import annotations

from typing import Any

HEAD, SMALL_HEAD = 128, 64
_FFN = 3.5
"""The FFN width relative to the hidden size, as in Llama 3's 8B and 70B."""


def shape_of(params: float, vocab: int = 128256) -> dict[str, Any]:
    """The `[model]` keys with the nearest number of parameters: hidden about 128 times the layers (Llama 3: 102 to 130), heads of
    128, one KV head for every four or more heads. Small models tie their embeddings, as Llama 3.2's and Qwen's do."""
    best: tuple[float, dict[str, Any]] | None = None
    for hidden in _hiddens():
        usual = hidden / 128
        for layers in range(max(2, round(0.7 * usual)), max(3, round(1.35 * usual)) + 1):
            keys = _keys(hidden, layers, vocab, hidden <= 3072)
            # The number of parameters counts most; among equally near ones, the usual proportions win.
            off = abs(count(keys) / params - 1) + 0.02 * abs(layers / usual - 1)
            if best is None or off < best[0]:
                best = off, keys
    assert best is not None
    return best[1]


def count(keys: dict[str, Any]) -> int:
    """The number of parameters of a shape."""
    hidden, layers, ffn, vocab = (int(keys[name]) for name in ("hidden", "layers", "ffn", "vocab"))
    shared = keys["kv_heads"] / keys["heads"]
    layer = 2 * hidden * hidden + round(2 * hidden * hidden * shared) + 3 * hidden * ffn + 2 * hidden
    return layers * layer + hidden + vocab * hidden * (1 if keys["tied_embeddings"] else 2)


def _hiddens() -> list[int]:
    steps = ((64, 1024, 64), (1024, 4096, 256), (4096, 8192, 512), (8192, 65537, 1024))
    return [hidden for low, high, step in steps for hidden in range(low, high, step)]


def _keys(hidden: int, layers: int, vocab: int, tied: bool) -> dict[str, Any]:
    heads = hidden // (HEAD if hidden >= 1024 else SMALL_HEAD)
    kv = (
        8
        if heads >= 32 and heads % 8 == 0
        else next(n for n in (4, 2, 1) if heads % n == 0 and (n <= heads // 4 or n == 1))
    )
    ffn = max(64, round(_FFN * hidden / 128) * 128) if hidden >= 512 else 4 * hidden
    return dict(layers=layers, hidden=hidden, heads=heads, kv_heads=kv, ffn=ffn, vocab=vocab, tied_embeddings=tied)
