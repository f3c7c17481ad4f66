"""Packed conversations are learned as if each had a row of its own: the same loss and the same gradient, in float64."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch

from shardwise.data.batches import Batch, Samples
from shardwise.data.build import build
from shardwise.data.chat.job import ChatOptions
from shardwise.data.pack import pack
from shardwise.data.shards import TokenSet
from shardwise.model import Transformer, initialize
from shardwise.run import ModelConfig
from shardwise.run.derive import derive_model

LENGTH = 64


def loss_and_gradient(model: Transformer, batch: Batch) -> tuple[float, torch.Tensor]:
    targets = torch.from_numpy(batch.targets)
    where = torch.from_numpy(batch.positions), torch.from_numpy(batch.documents)
    model.zero_grad()
    loss = model(torch.from_numpy(batch.tokens), *where, finish=lambda x, matrix: model.loss(x, matrix, targets)).result
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


def test_packed_is_unpacked(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = []
    for _ in range(12):
        turns = [role for _ in range(rng.randint(1, 2)) for role in ("user", "assistant")]
        rows.append({"messages": [{"role": role, "content": "ab c"[: rng.randint(1, 4)]} for role in turns]})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    build([tmp_path / "a.jsonl"], tmp_path / "set", workers=1, chat=ChatOptions(template=template))
    tokens = TokenSet.open(tmp_path / "set")
    config = derive_model(ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, vocab=257), LENGTH)
    model = Transformer(config).double()
    initialize(model, config, 0)
    packed = Samples([pack(tokens, LENGTH)], LENGTH)
    together = packed.take(np.arange(packed.count))
    assert together.documents is not None
    assert packed.count < len(rows) / 2
    alone = Samples([pack(tokens, LENGTH, n, n + 1) for n in range(len(rows))], LENGTH)
    apart = alone.take(np.arange(alone.count))
    assert together.loss_tokens == apart.loss_tokens == tokens.index.learned
    loss, gradient = loss_and_gradient(model, together)
    expected, by_row = loss_and_gradient(model, apart)
    assert abs(loss - expected) < 1e-9 * expected
    torch.testing.assert_close(gradient, by_row, rtol=1e-9, atol=1e-12)
