"""The built-in corpus: the documentation topics and the standard library of CPython, as bytes, so that a first run needs no
download. It is built once into a cache folder named after its content, and split into training and validation by a hash of
each document's name."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from shardwise.data.shard_writer import ShardWriter
from shardwise.data.shards import TokenSet
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.run.problems import Problem, UserError

VALIDATION_SHARE = 0.05
# Folders that are not the library itself: installed packages, tests, code tables, and files of the machine's build.
_OTHER_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}
_OTHER_PREFIXES = ("config-", "_sysconfig")
# Largest share of digits in a file: code has a few percent, tables of numbers more.
_MOST_DIGITS = 0.08
_DIGITS, _SPACES = b"0123456789", b" \t\r\n\f"


def corpus_texts() -> dict[str, str]:
    """Every document by its name, `topic/…` or `library/…`, sorted."""
    return dict(sorted([*_topics(), *_library()]))


def _topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it separately
        return
    for name, text in topics.items():
        yield f"topic/{name}", text


def _library() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for here, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in _OTHER_FOLDERS and not f.startswith(_OTHER_PREFIXES)]
        for file in files:
            path = Path(here, file)
            if not file.endswith(".py") or file.startswith(_OTHER_PREFIXES):
                continue
            try:
                content = path.read_bytes()
                text = content.decode("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if not _is_data(content):
                yield f"library/{path.relative_to(root).as_posix()}", text


def _is_data(content: bytes) -> bool:
    seen = len(content.translate(None, _SPACES))
    digits = len(content) - len(content.translate(None, _DIGITS))
    return digits > _MOST_DIGITS * seen or not seen


def split(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names for training and for validation, some of each kind of document in both. Both are ordered by hash, so that any
    part of either is a mixture of everything."""
    by_hash = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    train, validation = [], []
    for kind in sorted({name.partition("/")[0] for name in by_hash}):
        mine = [name for name in by_hash if name.partition("/")[0] == kind]
        held_out = max(round(len(mine) * VALIDATION_SHARE), 1)
        validation += mine[:held_out]
        train += mine[held_out:]
    order = {name: place for place, name in enumerate(by_hash)}
    return sorted(train, key=order.__getitem__), sorted(validation, key=order.__getitem__)


def builtin_corpus() -> Path:
    """The folder of the built-in corpus, with the token sets `train` and `validation`; built when it does not exist."""
    texts = corpus_texts()
    if not texts:
        message = "this Python brings neither its library's source nor its documentation; build a set of your own"
        raise UserError(Problem(message, "data.sets"))
    content = hashlib.sha256()
    for name, text in texts.items():
        content.update(f"{name}\0{text}\0".encode())
    name = f"corpus-{platform.python_version()}-{content.hexdigest()[:16]}"
    reasons = []
    for parent in _cache_folders():
        try:
            parent.mkdir(parents=True, exist_ok=True)
            return _cached(parent / name, texts)
        except OSError as e:
            reasons.append(f"{parent} ({e.strerror})")
    message = f"the built-in corpus cannot be written: {', '.join(reasons)}; set XDG_CACHE_HOME to another folder"
    raise UserError(Problem(message, "data.sets"))


def _cache_folders() -> Iterator[Path]:
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"
    user = os.getuid() if hasattr(os, "getuid") else "user"
    yield Path(tempfile.gettempdir()) / f"shardwise-{user}"


def _whole(folder: Path) -> bool:
    try:
        TokenSet.open(folder / "train")
        TokenSet.open(folder / "validation")
    except UserError:
        return False
    return True


def _cached(folder: Path, texts: dict[str, str]) -> Path:
    if _whole(folder):
        return folder
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        for role, names in zip(("train", "validation"), split(texts), strict=True):
            _write(draft / role, [texts[name] for name in names])
        if folder.exists() and not _whole(folder):
            shutil.rmtree(folder)
        try:
            os.rename(draft, folder)
        except OSError:
            # Another process was faster; its result is the same.
            if not _whole(folder):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write(folder: Path, texts: list[str]) -> None:
    tokenizer = ByteTokenizer()
    folder.mkdir()
    end = np.array([tokenizer.end], dtype=np.uint16)
    lengths = []
    with ShardWriter(folder, tokenizer) as writer:
        for ids in tokenizer.encode_batch(texts):
            writer.append(ids)
            writer.append(end)
            lengths.append(len(ids))
        ends = np.cumsum(lengths) + np.arange(1, len(lengths) + 1)
        source = f"documentation topics and standard library of Python {platform.python_version()}"
        writer.finish([ends], text_bytes=sum(lengths), source=[source])
