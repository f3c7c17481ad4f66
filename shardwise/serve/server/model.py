"""The server's view of its model, from the files of the checkpoint: name, tokenizer, chat template, the tokens that end an answer,
and the sampling parameters that its publisher recommends, which are the defaults of a request."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.data.chat.files import templates_in
from shardwise.data.chat.template import PLAIN, ChatTemplate, load_template
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.serve.generate import ends_of, read_generation

# The parameters that a generation_config.json may recommend, and their valid ranges.
RECOMMENDED = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 100.0),
}


@dataclass(frozen=True)
class Model:
    """A model as its clients see it."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate = field(default_factory=lambda: ChatTemplate(PLAIN))
    ends: frozenset[int] = frozenset()
    """Tokens that end an answer."""
    recommended: Mapping[str, float] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def first(self) -> int:
        """The token that stands for an empty prompt."""
        return self.tokenizer.special_tokens.get("bos", ("", self.tokenizer.end))[1]


def load_model_files(folder: Path, name: str, template: str | Path | None = None, adapter: Path | None = None) -> Model:
    """The model of a checkpoint folder; `template` is a file to use instead of the chat template of the folder or of its
    `adapter`."""
    tokenizer = load_tokenizer(folder)
    generation = read_generation(folder)
    return Model(
        name=name,
        tokenizer=tokenizer,
        template=load_template(adapter if adapter and templates_in(adapter) else folder, tokenizer, template),
        ends=ends_of(folder, tokenizer),
        recommended={
            key: generation[key] for key, limits in RECOMMENDED.items() if _within(generation.get(key), limits)
        },
    )


def _within(value: Any, limits: tuple[float, float]) -> bool:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return known and limits[0] <= value <= limits[1]
