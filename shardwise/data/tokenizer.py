"""Text to token ids and back: raw bytes, or any `tokenizer.json` of the `tokenizers` library. A tokenizer saves itself into
the folder of a token set or a checkpoint, so that readers of the folder use the same ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.data.chat.files import FILE as TEMPLATE
from shardwise.data.chat.files import choose_template
from shardwise.data.pieces import Pieces
from shardwise.files import write_atomically
from shardwise.run.problems import Problem, UserError, install, nearest, unreadable

FILE = "tokenizer.json"
# Beside tokenizer.json, because that file does not say which of its tokens ends a document.
MARKER = "shardwise_tokenizer.json"
BYTE = "byte"

# Names of the end-of-document token in published tokenizers, the least ambiguous first.
END_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|endofdocument|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|im_end|>",
    "<|eot_id|>",
    "<|return|>",
    "[SEP]",
)
# Names of the tokens that begin and pad a text, for tokenizers without a `tokenizer_config.json`.
OTHER_NAMES = {
    "bos": ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<s>", "<bos>", "<|bos|>", "[BOS]", "<|startoftext|>"),
    "pad": ("<|finetune_right_pad_id|>", "<｜▁pad▁｜>", "<pad>", "<|pad|>", "[PAD]"),
}


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    kind: str
    template: str
    """The chat template that belongs to it; empty if there is none. It does not affect the ids."""

    @property
    def vocab(self) -> int:
        """One more than the largest token id."""

    @property
    def end(self) -> int:
        """The token that ends a document."""

    @property
    def special_tokens(self) -> dict[str, tuple[str, int]]:
        """The name and id of `eos`, which is the end token, and of `bos` and `pad` if it has them."""

    @property
    def digest(self) -> str:
        """Two tokenizers with the same digest produce the same ids."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with no special token added."""

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a prompt, with the special tokens that `tokenizer.json` puts before it, such as Llama's BOS token."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The tokens of several texts, one array for each text."""

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[NDArray[Any], NDArray[np.uint8]]]:
        """The tokens of several texts, each with a mask: 1 where the token holds a character of one of the text's spans."""

    @property
    def added(self) -> dict[str, int]:
        """Added tokens by name. They are never split, wherever they occur in a text; chat templates write such tokens."""

    @property
    def prefix(self) -> list[int]:
        """The tokens that `encode_prompt` puts before a text."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens; special tokens are left out."""

    def piece(self, token: int, first: bool = False) -> bytes:
        """The bytes that a token appends to a text, or starts it with if `first`; empty for a special token."""

    def name(self, token: int) -> str:
        """The name of a special token; empty for other tokens, which are named by their piece."""

    def save(self, folder: str | Path) -> None:
        """Write the files that `load_tokenizer(folder)` needs into a folder."""


def facts_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """What tells tokenizers apart, in the index and the plan of a token set."""
    return {name: getattr(tokenizer, name) for name in ("kind", "vocab", "end", "digest")}


class ByteTokenizer:
    """Tokens 0 to 255 are the bytes of UTF-8; 256 ends a document."""

    kind = BYTE
    vocab = 257
    end = 256
    special_tokens: ClassVar = {"eos": (END_NAMES[0], 256)}
    digest = BYTE
    added: ClassVar[dict[str, int]] = {}
    prefix: ClassVar[list[int]] = []

    def __init__(self, template: str = "") -> None:
        self.template = template

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    encode_prompt = encode

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[NDArray[Any], NDArray[np.uint8]]]:
        made = []
        for text, ids, own in zip(texts, self.encode_batch(texts), spans, strict=True):
            mask = np.zeros(len(ids), dtype=np.uint8)
            for start, stop in own:
                first = len(text[:start].encode("utf-8"))
                mask[first : first + len(text[start:stop].encode("utf-8"))] = 1
            made.append((ids, mask))
        return made

    def decode(self, ids: Iterable[int]) -> str:
        # A sample may end in the middle of a character, and a model may generate bytes that are not text.
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")

    def piece(self, token: int, first: bool = False) -> bytes:
        return bytes([token]) if 0 <= token < 256 else b""

    def name(self, token: int) -> str:
        return END_NAMES[0] if token == self.end else ""

    def save(self, folder: str | Path) -> None:
        _save(Path(folder), {"kind": BYTE}, self.template)


class JsonTokenizer:
    """A `tokenizer.json`. Truncation and padding are off: a token set holds every token once."""

    kind = "json"

    def __init__(
        self,
        content: bytes,
        *,
        end: str = "",
        hints: Mapping[str, str] | None = None,
        where: str = FILE,
        template: str = "",
    ) -> None:
        """`end` names the end-of-document token. `hints` holds names of `eos`, `bos` and `pad` to try before the usual ones; an
        empty `bos` or `pad` means that the tokenizer has none."""
        hints = hints or {}
        self.template = template
        self._content = content
        self._library = _read(content, where)
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(Problem("is a tokenizer without a single token", where=where))
        # Ids may have gaps, so the count of tokens would be too small.
        self.vocab = max(vocabulary.values()) + 1
        self.end_name = _find_end(vocabulary, end, hints.get("eos", ""), where)
        self.end: int = vocabulary[self.end_name]
        added = self._library.get_added_tokens_decoder()
        self._names = {number: token.content for number, token in added.items() if token.special}
        self.added = {token.content: number for number, token in added.items() if not token.content.isspace()}
        special = set(self._names.values())
        self.special_tokens = {"eos": (self.end_name, self.end)}
        for role, names in OTHER_NAMES.items():
            usual = next((name for name in names if name in special), "")
            if (name := hints.get(role, usual)) in vocabulary:
                self.special_tokens[role] = name, vocabulary[name]
        self.digest = hashlib.sha256(content + b"\0" + self.end_name.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._library.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        return self._library.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        kind = np.uint16 if self.vocab <= 2**16 else np.uint32
        # The fast call does not compute offsets, which are not needed here.
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=kind) for encoding in encodings]

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[NDArray[Any], NDArray[np.uint8]]]:
        kind = np.uint16 if self.vocab <= 2**16 else np.uint32
        made = []
        for encoding, own in zip(self._library.encode_batch(texts, add_special_tokens=False), spans, strict=True):
            ids = np.array(encoding.ids, dtype=kind)
            mask = np.zeros(len(ids), dtype=np.uint8)
            for span in own:
                mask[_tokens_of(encoding, span)] = 1
            made.append((ids, mask))
        return made

    @cached_property
    def prefix(self) -> list[int]:
        whole, plain = self.encode_prompt("a"), self.encode("a")
        return next((whole[:n] for n in range(len(whole)) if whole[n : n + len(plain)] == plain), [])

    def decode(self, ids: Iterable[int]) -> str:
        # A model's embedding may have more rows than the tokenizer has tokens.
        return self._library.decode([i for i in map(int, ids) if 0 <= i < self.vocab])

    def piece(self, token: int, first: bool = False) -> bytes:
        return self._pieces(token, first)

    def name(self, token: int) -> str:
        return self._names.get(token, "")

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self._library, json.loads(self._content).get("decoder"), frozenset(self._names))

    def save(self, folder: str | Path) -> None:
        others = {role: self.special_tokens.get(role, ("", 0))[0] for role in OTHER_NAMES}
        _save(Path(folder), {"kind": self.kind, "end": self.end_name, **others}, self.template, self._content)


def _tokens_of(encoding: Any, span: tuple[int, int]) -> slice:
    """The tokens that hold a character of a span. The tokenizer may drop a character, or spread it over several tokens, each of
    which then reports the whole character as its offsets."""
    start, stop = span
    first = next((t for at in range(start, stop) if (t := encoding.char_to_token(at)) is not None), None)
    if first is None:
        return slice(0, 0)
    last = next(t for at in range(stop - 1, start - 1, -1) if (t := encoding.char_to_token(at)) is not None)
    while last + 1 < len(encoding) and (place := encoding.token_to_chars(last + 1)) and place[0] < stop:
        last += 1
    return slice(first, last + 1)


def load_tokenizer(where: str | Path, end: str = "") -> Tokenizer:
    """Load the tokenizer called "byte", a `tokenizer.json`, or the one in a folder. `end` names the end-of-document token if it
    has no usual name."""
    path = Path(where)
    if str(where) == BYTE:
        if end:
            raise UserError(Problem(f'the byte tokenizer has its own end of document; "{end}" cannot be it', "--end"))
        return ByteTokenizer()
    if path.is_dir():
        return _from_folder(path, end)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        message = f'there is no such tokenizer; give "{BYTE}", a {FILE}, or a folder that holds one'
        raise UserError(Problem(message, where=str(where))) from None
    except OSError as e:
        raise unreadable(e, where=where) from None
    template = _template(path.parent)
    return JsonTokenizer(content, end=end, hints=_published(path.parent), where=str(path), template=template)


def _from_folder(folder: Path, end: str) -> Tokenizer:
    marker = _read_marker(folder)
    if marker.get("kind") == BYTE:
        load_tokenizer(BYTE, end)  # raises if `end` is given
        return ByteTokenizer(_template(folder))
    if not (folder / FILE).is_file():
        message = f"holds neither {FILE} nor {MARKER}, so its tokenizer is unknown"
        raise UserError(Problem(message, where=str(folder)))
    content = (folder / FILE).read_bytes()
    # A marker of version 0.1 names only the end token.
    named = {"eos": marker.get("end") or None, "bos": marker.get("bos"), "pad": marker.get("pad")}
    hints = _published(folder) | {role: name for role, name in named.items() if name is not None}
    return JsonTokenizer(content, end=end, hints=hints, where=str(folder / FILE), template=_template(folder))


def _read(content: bytes, where: str) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        message = f"a tokenizer.json needs the tokenizers library: {install('train')}"
        raise UserError(Problem(message, where=where)) from None
    try:
        library = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as e:  # the library raises bare Exception for whatever it cannot read
        raise UserError(Problem(f"is not a tokenizer the tokenizers library can read: {e}", where=where)) from None
    library.no_truncation()
    library.no_padding()
    return library


def _find_end(vocabulary: dict[str, int], end: str, hint: str, where: str) -> str:
    if end:
        if end not in vocabulary:
            message = f'the tokenizer has no token "{end}" to end a document with{nearest(end, vocabulary)}'
            raise UserError(Problem(message, "--end", where))
        return end
    for name in (hint, *END_NAMES):
        if name in vocabulary:
            return name
    known = ", ".join(END_NAMES[:5])
    message = f"has no token that is known to end a document ({known}, …); name it with --end TOKEN"
    raise UserError(Problem(message, where=where))


def _published(folder: Path) -> dict[str, str]:
    """The special tokens named in a published model's `tokenizer_config.json`; empty without that file."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    found = {}
    for role in ("eos", *OTHER_NAMES) if isinstance(config, dict) else ():
        named = config.get(f"{role}_token")
        named = named.get("content") if isinstance(named, dict) else named
        found[role] = named if isinstance(named, str) else ""
    return found


def _template(folder: Path) -> str:
    return (choose_template(folder) or ("", ""))[0]


def _save(folder: Path, marker: dict[str, str], template: str, content: bytes = b"") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if content:
        write_atomically(folder / FILE, content)
    write_atomically(folder / MARKER, (json.dumps(marker) + "\n").encode())
    if template:
        write_atomically(folder / TEMPLATE, template.encode())


def _read_marker(folder: Path) -> dict[str, str]:
    path = folder / MARKER
    if not path.exists():
        return {}
    try:
        marker = json.loads(path.read_bytes())
        known = marker["kind"] in (BYTE, JsonTokenizer.kind) and all(isinstance(v, str) for v in marker.values())
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise UserError(Problem('does not say {"kind": "byte"} or {"kind": "json", "end": …}', where=str(path)))
    return marker
