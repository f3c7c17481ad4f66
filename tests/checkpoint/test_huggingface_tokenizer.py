"""The tokenizer of a run in the Hugging Face folder made of it: transformers finds the tokens that begin, end and pad a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from late import Late

from shardwise.checkpoint.huggingface import from_hf, to_hf
from shardwise.data.build import build
from shardwise.data.tokenizer import ByteTokenizer, load_tokenizer
from shardwise.run import run_from_dict
from shardwise.train.loop import train

transformers: Any = Late("transformers")

TEXTS = ["The quick brown fox jumps over the lazy dog. " * 8, "Grüße, 漢字 und 🦊! " * 8] * 4


def write_tokenizer(folder: Path, special: list[str]) -> Path:
    """A byte-level `tokenizer.json` with these special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    return folder


def exported(tmp_path: Path, tokenizer: str | Path, end: str = "") -> Path:
    """A Hugging Face folder of a run that was trained for one step on a set made with a tokenizer."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    build([tmp_path / "in.jsonl"], tmp_path / "set", tokenizer=tokenizer, end=end, workers=1)
    vocab = load_tokenizer(tmp_path / "set").vocab
    model = dict(layers=1, hidden=16, heads=2, ffn=32, vocab=vocab)
    settings = dict(steps=1, seq_len=32, global_batch=2, device="cpu", eval_every=0)
    run = dict(name="tiny", model=model, data=dict(sets=[str(tmp_path / "set")]), train=settings)
    train(run_from_dict(run), tmp_path / "run")
    to_hf(tmp_path / "run", tmp_path / "hf")
    return tmp_path / "hf"


def tokens_of(folder: Path) -> tuple[Any, ...]:
    found = transformers.AutoTokenizer.from_pretrained(folder)
    return found.bos_token, found.eos_token, found.pad_token


def ids_in(file: Path) -> list[Any]:
    content = json.loads(file.read_text())
    return [content[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")]


def test_the_special_tokens_of_a_run_are_those_of_its_export(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tok", ["<s>", "</s>", "<pad>", "<stop>"])
    hf = exported(tmp_path, tokenizer, end="<stop>")
    assert tokens_of(hf) == ("<s>", "<stop>", "<pad>")
    assert ids_in(hf / "generation_config.json") == ids_in(hf / "config.json") == [0, 3, 2]
    generation = transformers.GenerationConfig.from_pretrained(hf)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (0, 3, 2)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(hf), load_tokenizer(tmp_path / "set")
    assert theirs(TEXTS[1], add_special_tokens=False).input_ids == ours.encode(TEXTS[1])
    assert theirs.model_max_length == 32
    # And back again, where both files are published ones.
    from_hf(hf, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "again")
    assert tokens_of(tmp_path / "again") == ("<s>", "<stop>", "<pad>")
    assert ids_in(tmp_path / "again" / "generation_config.json") == [0, 3, 2]


def test_a_published_config_says_which_tokens_are_special(tmp_path: Path) -> None:
    """Also that there is none, whatever the tokens are called; and a token set keeps it."""
    tokenizer = write_tokenizer(tmp_path / "tok", ["<s>", "<odd>", "<fill>"])
    config = dict(bos_token=None, eos_token="<odd>", pad_token=dict(content="<fill>"))
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    hf = exported(tmp_path, tokenizer)
    assert tokens_of(hf) == (None, "<odd>", "<fill>")
    assert ids_in(hf / "generation_config.json") == ids_in(hf / "config.json") == [None, 1, 2]
    # A set of version 0.1 has a marker that names the end alone: then the usual names are looked for.
    (tmp_path / "set" / "shardwise_tokenizer.json").write_text('{"kind": "json", "end": "<odd>"}')
    assert load_tokenizer(tmp_path / "set").special_tokens == {"eos": ("<odd>", 1), "bos": ("<s>", 0)}


def test_the_byte_tokenizer_is_one_that_transformers_can_read(tmp_path: Path) -> None:
    hf = exported(tmp_path, "byte")
    assert tokens_of(hf) == (None, "<|endoftext|>", None)
    assert ids_in(hf / "generation_config.json") == ids_in(hf / "config.json") == [None, 256, None]
    theirs, ours = transformers.AutoTokenizer.from_pretrained(hf), ByteTokenizer()
    text = "".join(map(chr, range(256))) + TEXTS[1]
    assert theirs(text).input_ids == ours.encode(text)
    assert theirs.decode(ours.encode(TEXTS[1])) == TEXTS[1]
    assert theirs(theirs.eos_token).input_ids == [ours.end]
    assert isinstance(load_tokenizer(hf), ByteTokenizer)
