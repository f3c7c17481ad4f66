"""The files of a checkpoint: their content, and checks that it is still as written.

Every rank writes `rank-00000.safetensors` with its shards under the names of the whole tensors. The header's metadata has, as JSON
under `shards`, the whole tensor's shape, the shard's offset in it, and a checksum of its bytes. `manifest.json` lists all files
with their sizes and checksums (for a file of shards, the header's), and ends with a checksum of itself. So every byte is covered
by a checksum, nothing read here can execute code, and no name in a file can lead out of the folder.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.run import Problem, UserError
from shardwise.run.problems import unreadable

RUN_FILE = "run.toml"
MANIFEST = "manifest.json"
FORMAT = 3  # 1: whole tensors, written by the first rank; 2: bytes of each rank and a JSON table beside them
BLOCK = 1 << 24  # bytes read or written at once
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Progress = Callable[[int], None]
"""Called with the bytes of every block that was read or written, so that a slow disk is not taken for a hang."""


def unwatched(count: int) -> None:
    """The default progress hook, which does nothing."""


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SHARDS = re.compile(r"rank-\d{5,}\.safetensors")


class OtherFormat(UserError):
    """A checkpoint of an earlier or later version: it is not damaged, and must not be skipped in favour of an older one."""


@dataclass(frozen=True)
class Shard:
    """A box of a whole tensor, `size` elements from `offset` on in each dimension, and the location of its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: Path
    begin: int
    crc: int | None  # None in files of other programs

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True)
class LocalShard:
    """A shard that this rank writes: the whole tensor's name and shape, the shard's offset in it, and its values."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint: its step, when it was saved, the layout that wrote it, the counters, and the size and
    checksum of every file."""

    step: int
    saved: str
    layout: dict[str, Any]
    state: dict[str, Any]
    files: dict[str, tuple[int, int]]

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(size for size, _ in self.files.values())


def shard_file(rank: int) -> str:
    """The file of a rank's shards."""
    return f"rank-{rank:05d}.safetensors"


def to_json(manifest: Manifest) -> str:
    """The manifest as JSON text, with its own checksum."""
    content = {"format": FORMAT} | vars(manifest)
    return json.dumps(content | {"crc": _own_checksum(content)}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest; raises `UserError` if something is wrong with it."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(Problem("there is no such folder", where=str(folder)))
    if not path.exists():
        raise UserError(Problem(f"holds no {MANIFEST}, so it is not a complete checkpoint", where=str(folder)))
    os.close(open_plain(path))
    content = read_json(path)
    crc, version = content.pop("crc", None), content.get("format")
    whole = crc == _own_checksum(content)
    if isinstance(version, int) and version > FORMAT:
        reason = f"was written by a newer version of Shardwise (format {version}; this one reads {FORMAT})"
        raise OtherFormat(Problem(reason, where=str(folder)))
    if isinstance(version, int) and version < FORMAT and whole:
        reason = (
            f"has format {version}, which Shardwise 0.1 was the last to read: finish the run with that version, or export its "
            "weights with that version's `shardwise convert to-hf`, import them with `shardwise convert from-hf`, and name them "
            "as train.weights of a new run"
        )
        raise OtherFormat(Problem(reason, where=str(folder)))
    try:
        if version != FORMAT or not whole:
            raise ValueError
        files = {name: (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
        manifest = Manifest(content["step"], content["saved"], content["layout"], content["state"], files)
        if type(manifest.step) is not int or not isinstance(manifest.state, dict):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(Problem("is damaged: its checksum does not fit what it says", where=str(path))) from None
    outside = [name for name in files if not _NAME.fullmatch(name)]
    if outside:
        raise UserError(Problem(f"names {outside[0]!r}; a checkpoint's files lie in its own folder", where=str(path)))
    return manifest


def read_shards(folder: Path, manifest: Manifest, progress: Progress = unwatched) -> dict[str, list[Shard]]:
    """The shards of every tensor, checked to make up the whole tensor."""
    tensors: dict[str, list[Shard]] = {}
    for file in manifest.files:
        if _SHARDS.fullmatch(file):
            check_file(folder, file, manifest)
            for shard in read_header(folder / file, sharded=True):
                tensors.setdefault(shard.name, []).append(shard)
            progress(1)  # one file per rank, possibly thousands
    for name, shards in tensors.items():
        first = shards[0]
        same = all((s.shape, s.dtype) == (first.shape, first.dtype) for s in shards)
        if not same or sum(math.prod(s.size) for s in shards) != math.prod(first.shape):
            raise UserError(Problem(f"does not hold the whole of {name}", where=str(folder)))
    return tensors


def read_header(file: Path, sharded: bool = False) -> list[Shard]:
    """The content of a safetensors file, in byte order: shards as its metadata describes them, or else whole tensors. The library
    validates the file. Offsets are read here, because the library would map the file, and touched pages count as memory until it
    is closed."""
    try:
        with safe_open(file, framework="pt"):
            pass
        with open(file, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length))
    except FileNotFoundError:
        raise UserError(Problem("there is no such file", where=str(file))) from None
    except (SafetensorError, ValueError) as e:
        raise UserError(
            Problem(f"is not a complete safetensors file ({e}); fetch or write it again", where=str(file))
        ) from None
    except OSError as e:
        raise unreadable(e, where=file) from None
    metadata = header.pop("__metadata__", {})
    unknown = sorted({entry["dtype"] for entry in header.values()} - DTYPES.keys())
    if unknown:
        raise UserError(Problem(f"holds tensors of type {some(unknown)}; known: {', '.join(DTYPES)}", where=str(file)))
    try:
        boxes = json.loads(metadata["shards"]) if sharded else {}
        return [
            _shard(name, entry, boxes[name] if sharded else None, file, 8 + length)
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(Problem("does not say which shards of which tensors it holds", where=str(file))) from None


def _shard(name: str, entry: dict[str, Any], box: dict[str, Any] | None, file: Path, data: int) -> Shard:
    size, dtype, begin = tuple(entry["shape"]), DTYPES[entry["dtype"]], data + entry["data_offsets"][0]
    if box is None:
        return Shard(name, dtype, size, (0,) * len(size), size, file, begin, None)
    shape, offset = tuple(box["shape"]), tuple(box["offset"])
    whole = all(type(n) is int and n >= 0 for n in (*shape, *offset))
    if not whole or not all(o + n <= all_of_it for o, n, all_of_it in zip(offset, size, shape, strict=True)):
        raise ValueError
    return Shard(name, dtype, shape, offset, size, file, begin, int(box["crc32"], 16))


def damage(folder: Path, share: tuple[int, int] = (0, 1), progress: Progress = unwatched) -> Iterator[Problem]:
    """The problems of a checkpoint, found by reading every byte. With a `share` of (n, of) only every of-th file of shards is read
    in full, from the n-th on: ranks that each take one share together read all of it."""
    try:
        manifest = read_manifest(folder)
        tensors = read_shards(folder, manifest, progress)
    except OtherFormat:
        raise
    except UserError as e:
        yield from e.problems
        return
    by_file: dict[str, list[Shard]] = {file: [] for file in sorted(manifest.files) if _SHARDS.fullmatch(file)}
    for shard in (shard for shards in tensors.values() for shard in shards):
        by_file[shard.file.name].append(shard)
    for file in (file for file in manifest.files if file not in by_file):
        try:
            check_file(folder, file, manifest)
        except UserError as e:
            yield from e.problems
    for n, (file, shards) in enumerate(by_file.items()):
        if n % share[1] == share[0]:
            yield from _check_bytes(folder / file, sorted(shards, key=lambda shard: shard.begin), progress)


def _check_bytes(path: Path, shards: list[Shard], progress: Progress) -> Iterator[Problem]:
    try:
        with open(open_plain(path), "rb", buffering=0) as f:
            for shard in shards:
                f.seek(shard.begin)
                if _checksum_of(f.fileno(), shard.bytes, progress) != shard.crc:
                    yield Problem(f"is damaged: the bytes of {shard.name} are not those written", where=str(path))
                    return
    except OSError as e:
        yield Problem(f"cannot be read: {e.strerror}", where=str(path))


def check_file(folder: Path, file: str, manifest: Manifest) -> None:
    """Raise unless a file has the size and the checksum listed in the manifest."""
    if file not in manifest.files:
        raise UserError(Problem(f"names no {file}", where=str(folder / MANIFEST)))
    found, written = size_and_checksum(folder / file), manifest.files[file]
    if found[0] != written[0]:
        raise UserError(Problem(f"has {found[0]} bytes, and {written[0]} were written", where=str(folder / file)))
    if found != written:
        raise UserError(Problem("is damaged: its checksum is not that of what was written", where=str(folder / file)))


def size_and_checksum(path: Path) -> tuple[int, int]:
    """Size and checksum of a checkpoint's file. In a file of shards the checksum is the header's; the shards have their own."""
    handle = open_plain(path)
    try:
        size = os.fstat(handle).st_size
        header = 8 + int.from_bytes(os.pread(handle, 8, 0), "little")
        return size, _checksum_of(handle, min(size, header) if _SHARDS.fullmatch(path.name) else size)
    except OSError as e:
        raise unreadable(e, where=path) from None
    finally:
        os.close(handle)


def _checksum_of(handle: int, size: int, progress: Progress = unwatched) -> int:
    """The checksum of the next `size` bytes of a file, or of the rest if there are fewer."""
    crc = 0
    while size and (block := os.read(handle, min(BLOCK, size))):
        crc, size = checksum(block, crc), size - len(block)
        progress(len(block))
    return crc


def checksum(data: Any, before: int = 0) -> int:
    """CRC-32, as in zip and PNG: fast, part of every Python, and certain to detect any damage within 32 consecutive bits. It
    guards against accidents; whoever can write to the folder can also write a matching checksum."""
    return zlib.crc32(data, before)


def _own_checksum(content: Mapping[str, Any]) -> int:
    return checksum(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def open_plain(path: Path) -> int:
    """A file descriptor for reading a regular file; links, pipes and folders are refused."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        reason = "is missing" if isinstance(e, FileNotFoundError) else f"cannot be read: {e.strerror}"
        if path.is_symlink():
            reason = "is a link; a checkpoint's files lie in its own folder"
        raise UserError(Problem(reason, where=str(path))) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(Problem("is not a file", where=str(path)))
    return handle


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; raises `UserError` if something is wrong with it."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as e:
        raise unreadable(e, where=path) from None
    except (ValueError, RecursionError) as e:
        raise UserError(Problem(f"is not valid JSON: {e}", where=str(path))) from None
    if not isinstance(content, dict):
        raise UserError(Problem("must hold a JSON object", where=str(path)))
    return content


def some(names: Iterable[str], most: int = 8) -> str:
    """The first names of a list, for a message; a broken folder may have thousands."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
