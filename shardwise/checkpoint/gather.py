"""What ranks let each other know about checkpoints: a short message and a few integers each, gathered by all at once.

They travel as tensors on the host: an `all_gather_object` would unpickle what arrives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.parallel.mesh import Mesh

TEXT = 480  # bytes of a message that travel


def gather(mesh: Mesh, text: str = "", numbers: Sequence[int] = ()) -> tuple[str, list[tuple[int, ...]]]:
    """The message of the first rank that has one ("" when none has), and the integers of every rank. All ranks must call it, with
    equally many integers."""
    if mesh.layout.world == 1:
        return text, [tuple(numbers)]
    message = text.encode()[:TEXT].ljust(TEXT, b"\0")
    mine = torch.cat(
        (
            torch.frombuffer(bytearray(message), dtype=torch.uint8),
            torch.tensor(numbers, dtype=torch.int64).view(torch.uint8),
        )
    )
    every = [torch.empty_like(mine) for _ in range(mesh.layout.world)]
    dist.all_gather(every, mine)
    texts = [bytes(each[:TEXT].tolist()).rstrip(b"\0").decode(errors="replace") for each in every]
    return next(filter(None, texts), ""), [tuple(each[TEXT:].clone().view(torch.int64).tolist()) for each in every]
