"""The files of a sharded checkpoint: what they say, and whether they still say what was written.

Every rank that saved left `rank-00000.bin`, pieces of tensors one after another, and `rank-00000.json`, a line for each piece:
the tensor's name, dtype and whole shape, where the piece lies in it, where in the file, and a checksum. `manifest.json`
names all files with their sizes and checksums, and closes with a checksum of itself. So every byte is accounted for, nothing
read here can execute code, and no name in a file can lead out of the folder.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.model.weight_files import DTYPES, read_json
from shardwise.run import Problem, UserError

MANIFEST = "manifest.json"
FORMAT = 2  # 1 was a file of whole tensors, written by the first rank
BLOCK = 1 << 24  # bytes read or written at once
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class NewerFormat(UserError):
    """A checkpoint of a version yet to come: not damaged, and not to be passed over for an older one."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and its bytes in a file. `offset` and `size` count elements of the whole tensor by dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    begin: int
    crc: int

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.size) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is: the step and when it was saved, by which layout, the counters, and every file with its size and
    checksum (none for the `.bin` files, whose pieces have their own)."""

    step: int
    saved: str
    layout: dict[str, Any]
    state: dict[str, Any]
    files: dict[str, tuple[int, int | None]]

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(size for size, _ in self.files.values())


def data_file(rank: int) -> str:
    """Where a rank keeps its pieces."""
    return f"rank-{rank:05d}.bin"


def table_file(rank: int) -> str:
    """Where a rank says what its pieces are."""
    return f"rank-{rank:05d}.json"


def to_json(manifest: Manifest) -> str:
    """The manifest as text, its own checksum with it."""
    content = {"format": FORMAT} | vars(manifest)
    return json.dumps(content | {"crc": _own_checksum(content)}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """A checkpoint's manifest, or a sentence about what is wrong with it."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(Problem("there is no such folder", where=str(folder)))
    if not path.exists():
        raise UserError(Problem(f"holds no {MANIFEST}, so it is not a whole checkpoint", where=str(folder)))
    _check_plain(path)
    content = read_json(path)
    version = content.get("format")
    if isinstance(version, int) and version > FORMAT:
        reason = f"was written by a newer version of Shardwise (format {version}; this one reads {FORMAT})"
        raise NewerFormat(Problem(reason, where=str(folder)))
    try:
        if version != FORMAT or content.pop("crc") != _own_checksum(content):
            raise ValueError
        files = {name: (int(size), crc) for name, (size, crc) in content["files"].items()}
        manifest = Manifest(content["step"], content["saved"], content["layout"], content["state"], files)
        if type(manifest.step) is not int or not isinstance(manifest.state, dict):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(Problem("is damaged: its checksum does not fit what it says", where=str(path))) from None
    outside = [name for name in files if not _NAME.fullmatch(name)]
    if outside:
        raise UserError(Problem(f"names {outside[0]!r}; a checkpoint's files lie in its own folder", where=str(path)))
    return manifest


def read_pieces(folder: Path, manifest: Manifest) -> dict[str, list[Piece]]:
    """Every tensor's pieces, checked to make up the whole of it."""
    pieces: dict[str, list[Piece]] = {}
    for file in manifest.files:
        if re.fullmatch(r"rank-\d{5,}\.json", file):
            check_file(folder, file, manifest)
            for piece in read_table(folder / file, manifest.files):
                pieces.setdefault(piece.name, []).append(piece)
    for name, parts in pieces.items():
        whole = math.prod(parts[0].shape)
        same = all((p.shape, p.dtype) == (parts[0].shape, parts[0].dtype) for p in parts)
        if not same or sum(math.prod(p.size) for p in parts) != whole:
            raise UserError(Problem(f"does not hold the whole of {name}", where=str(folder)))
    return pieces


def read_table(path: Path, files: Mapping[str, tuple[int, int | None]]) -> list[Piece]:
    """What a rank says that it saved; each piece must fit its tensor, and all of them fill the file without a gap."""
    content = read_json(path)
    file = path.with_suffix(".bin").name
    try:
        pieces = [_piece(entry, file) for entry in content["pieces"]]
    except (KeyError, TypeError, ValueError):
        raise UserError(Problem("does not say what pieces of which tensors were saved", where=str(path))) from None
    at = 0
    for piece in pieces:
        if piece.begin != at:
            raise UserError(Problem(f"places {piece.name} where another piece lies, or leaves a gap", where=str(path)))
        at += piece.bytes
    if file not in files or files[file][0] != at:
        raise UserError(Problem(f"speaks of {at} bytes, and {file} has another size", where=str(path)))
    return pieces


def damage(folder: Path, share: tuple[int, int] = (0, 1)) -> Iterator[Problem]:
    """What is wrong with a checkpoint, read to the last byte. With a share of (n, of) only every of-th file of pieces is read
    through, from the n-th on: ranks that each take theirs have together read all of it."""
    try:
        manifest = read_manifest(folder)
        pieces = read_pieces(folder, manifest)
    except NewerFormat:
        raise
    except UserError as e:
        yield from e.problems
        return
    by_file: dict[str, list[Piece]] = {}
    for parts in pieces.values():
        for piece in parts:
            by_file.setdefault(piece.file, []).append(piece)
    data = sorted(name for name, (_, crc) in manifest.files.items() if crc is None)
    for file in manifest.files:
        try:
            if file not in data:
                check_file(folder, file, manifest)
            elif data.index(file) % share[1] == share[0]:
                check_file(folder, file, manifest)
                yield from _check_data(folder / file, sorted(by_file.get(file, []), key=lambda p: p.begin))
        except UserError as e:
            yield from e.problems


def checksum(data: Any, before: int = 0) -> int:
    """CRC-32, as in zip and PNG: fast, in every Python, and sure to notice any damage within 32 bits, however it arose. It
    guards against accidents; whoever can write to the folder can also write a fitting checksum."""
    return zlib.crc32(data, before)


def open_plain(path: Path) -> int:
    """A file descriptor for reading: of a file in this very place, not of what a link points to, nor of a pipe or a folder."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
        raise UserError(Problem("is not a file", where=str(path)))
    except OSError as e:
        if path.is_symlink():
            raise UserError(Problem("is a link; a checkpoint's files lie in its own folder", where=str(path))) from None
        reason = "is missing" if isinstance(e, FileNotFoundError) else f"cannot be read: {e.strerror}"
        raise UserError(Problem(reason, where=str(path))) from None


def file_checksum(path: Path) -> int:
    """The checksum of a whole small file."""
    crc = 0
    handle = open_plain(path)
    try:
        while block := os.read(handle, BLOCK):
            crc = checksum(block, crc)
    finally:
        os.close(handle)
    return crc


def _own_checksum(content: Mapping[str, Any]) -> int:
    return checksum(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _check_plain(path: Path) -> None:
    os.close(open_plain(path))


def check_file(folder: Path, file: str, manifest: Manifest) -> None:
    """Raise unless a file has the size, and where it has one the checksum, that the manifest gives it."""
    if file not in manifest.files:
        raise UserError(Problem(f"names no {file}", where=str(folder / MANIFEST)))
    size, crc = manifest.files[file]
    path = folder / file
    handle = open_plain(path)
    try:
        found = os.fstat(handle).st_size
    finally:
        os.close(handle)
    if found != size:
        raise UserError(Problem(f"has {found} bytes, and {size} were written", where=str(path)))
    if crc is not None and file_checksum(path) != crc:
        raise UserError(Problem("is damaged: its checksum is not that of what was written", where=str(path)))


def _check_data(path: Path, pieces: list[Piece]) -> Iterator[Problem]:
    handle = open_plain(path)
    try:
        for piece in pieces:
            crc, left = 0, piece.bytes
            while left and (block := os.read(handle, min(BLOCK, left))):
                crc, left = checksum(block, crc), left - len(block)
            if left or crc != piece.crc:
                yield Problem(f"is damaged: the bytes of {piece.name} are not those written", where=str(path))
                return
    except OSError as e:
        yield Problem(f"cannot be read: {e.strerror}", where=str(path))
    finally:
        os.close(handle)


def _piece(entry: dict[str, Any], file: str) -> Piece:
    numbers = {key: tuple(_whole(n) for n in entry[key]) for key in ("shape", "offset", "size")}
    piece = Piece(entry["name"], entry["dtype"], **numbers, file=file, begin=_whole(entry["begin"]), crc=entry["crc"])
    fits = len(piece.shape) == len(piece.offset) == len(piece.size) and all(
        o + n <= whole for o, n, whole in zip(piece.offset, piece.size, piece.shape, strict=True)
    )
    if not fits or piece.dtype not in DTYPES or not isinstance(piece.name, str):
        raise ValueError
    return piece


def _whole(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError
    return number
