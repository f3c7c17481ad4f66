"""Trains a byte-level BPE on the kept documents, with the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.data.tokenizer import FILE
from shardwise.files import write_atomically
from shardwise.run.problems import Problem, UserError, install

if TYPE_CHECKING:
    from shardwise.data.prepare.recipe import TokenizerChoice

END = "<|endoftext|>"


def train_tokenizer(texts: Sequence[Path], choice: TokenizerChoice, folder: Path) -> None:
    """Write `tokenizer.json` into a folder, if it is not there. The same texts produce the same file."""
    if (folder / FILE).exists():
        return
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError:
        raise UserError(Problem(f"needs the tokenizers library: {install('prepare')}", "tokenizer.train")) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=choice.train,
        special_tokens=[choice.end or END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(texts, choice.train_bytes), trainer)
    folder.mkdir(exist_ok=True)
    write_atomically(folder / FILE, tokenizer.to_str().encode("utf-8"))


def sample(texts: Sequence[Path], most: int) -> Iterator[str]:
    """Documents from the beginning of every file in turn, up to `most` bytes, so that every source has its share."""
    share = max(1, most // max(1, len(texts)))
    for path in texts:
        taken = 0
        with open(path, "rb") as file:
            for line in file:
                if taken >= share:
                    break
                taken += len(line)
                yield json.loads(line)["text"]
