"""Computes a step of the scheduler on one device: the new tokens of all its sequences in one forward pass, then the next tokens.

Every sequence that runs has a slot. On the device lie, by slot, the pages it uses and the token it was given last; so a step that
only decodes needs to be told no more than slots and positions, and the next step can be launched before the host has seen what this
one picked. On a GPU such steps are recorded once for some batch sizes, as CUDA graphs, and replayed: launching their kernels one by
one would take longer than running them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shardwise.model.fused import fuse, load_kernels, tune, unembed
from shardwise.model.gemm.decoding import DecodingGemms
from shardwise.model.paged import PagedBatch, PagedCache
from shardwise.model.transformer import Transformer
from shardwise.schedules.serving.settings import graph_sizes, is_short, shared_sizes
from shardwise.serve.sampler import Picked, Sampler, on_host, send

if TYPE_CHECKING:
    from shardwise.parallel.inference import Peers


SHORT = (2, 15, 31, 63, 127, 255)
"""Tokens of prompts beside a token of another sequence, for which packed matrices have kernels of their own."""

BESIDE = 40
"""Sequences that decode beside prompts in a step that is run to compile what such steps use."""

Recorded = tuple[Callable[[], None], Tensor, Tensor, Tensor, Tensor]
"""A step to replay: how, its inputs, and the logits and tokens that it makes, each in its own memory."""
PICKED = -1
"""In the place of a token: the one that was picked last, which only the device knows."""


@dataclass(slots=True)
class Row:
    """The new tokens of one sequence in a step."""

    slot: int
    start: int
    """Tokens kept before."""
    tokens: Sequence[int] | None
    """The new tokens; None: the one that was picked for it last, which only the device knows yet."""
    count: int
    samples: int
    """For how many of them, the last ones, the next token is picked: all of them where they are a token and guesses to verify."""

    @property
    def single(self) -> bool:
        """Whether its tokens are computed as those of as many sequences of one token each, which see each other."""
        return self.count in (1, self.samples)

    def singles(self) -> list[Row]:
        """A row for each token."""
        if self.count == 1 or self.tokens is None:
            return [self]
        first = self.count - self.samples
        return [Row(self.slot, self.start + n, [token], 1, int(n >= first)) for n, token in enumerate(self.tokens)]


@dataclass
class Launched:
    """A step under way."""

    picked: Picked | None
    """Of each row that samples, one after the other."""
    slots: list[int] = field(default_factory=list)
    logits: Tensor | None = None
    """Of all new tokens, where a prompt's logprobs were asked for."""
    done: torch.cuda.Event | None = None
    tokens: Tensor | None = None
    """What was picked, on the host once the step is done."""

    def read(self) -> list[int]:
        """The tokens picked; waits for them."""
        if self.tokens is None:
            return []
        if self.done is not None:
            self.done.synchronize()
        return self.tokens.tolist()


def guesses(rows: Sequence[Row]) -> list[Sequence[int]]:
    """Of each token that a step picks, the guesses it follows; nothing where there are none."""
    if all(row.samples < 2 for row in rows):
        return []
    return [() if row.tokens is None else row.tokens[1 : n + 1] for row in rows for n in range(row.samples)]


def sampled(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """The slots for which a step picks tokens, and the position of each."""
    if all(row.samples == row.count == 1 for row in rows):
        return [row.slot for row in rows], [row.start + 1 for row in rows]
    slots: list[int] = []
    positions: list[int] = []
    for row in rows:
        end = row.start + row.count + 1
        slots += [row.slot] * row.samples
        positions += range(end - row.samples, end)
    return slots, positions


class Runner:
    """A model with its pages, slots and sampler. Page 0 and slot 0 belong to no one: padding uses them."""

    stages = 1
    """Steps that are computed at a time, by the stages of a pipeline."""

    def __init__(
        self, model: Transformer, pages: int, page_tokens: int, sequences: int, longest: int, kv_dtype: torch.dtype,
        peers: Peers | None = None, drafts: int = 0,
    ) -> None:  # fmt: skip
        """`peers`: the ranks that hold the other parts of the model. `drafts`: guesses of a sequence that a step verifies."""
        self.model, self.longest, self.page_tokens, self.peers = model, longest, page_tokens, peers
        self.device = next(model.parameters()).device
        self.sequences = sequences
        self.gpu = self.device.type == "cuda"
        self.records = self.gpu and (peers is None or peers.recordable)
        self.dtype = dtype = model.dtype or next(model.parameters()).dtype
        adding = (peers.add_up, peers.first) if peers is not None and peers.tensor is not None else ()
        self.gemms = DecodingGemms()
        self.fused = (
            fuse(model, longest, self.gemms, *adding) if self.gpu and dtype in (torch.bfloat16, torch.float16) else 0
        )
        self.unembed = partial(model.gemm, bias=None) if model.invariant else partial(unembed, gemms=self.gemms)
        heads = peers.place.kv_heads(model.config) if peers is not None else 0
        rows = sequences * (1 + drafts)
        self.cache = PagedCache(
            model.config, len(model.layers), pages, page_tokens, kv_dtype, self.device, rows, heads, model.invariant
        )
        wide = -(-longest // page_tokens)
        self.table = torch.zeros(sequences + 1, wide, dtype=torch.int32, device=self.device)
        self.sampler = Sampler(sequences + 1, model.config.vocab, self.device, model.invariant, rows)
        self.host: list[Tensor] = []
        self.drafts, self.sizes, self.shared_sizes = drafts, graph_sizes(sequences), shared_sizes(sequences, drafts)
        self.pool: Any = None
        self.graphs: dict[tuple[int, bool], Recorded] = {}
        """By rows, and by whether some are of one sequence."""
        self.read_by_graphs: list[Tensor] = []
        """What recorded kernels read beside their inputs: has to live as long as they do."""

    def set_pages(self, changes: Sequence[tuple[int, int, int]]) -> None:
        """(slot, index, page): pages that sequences use from now on."""
        if changes:
            made = self.send(np.asarray(changes, np.int64).T)
            self.table[made[0], made[1]] = made[2].int()

    def swap(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]], host_pages: int) -> None:
        """Move pages to the host's memory, which has room for so many, and pages from there back."""
        if not out and not back:
            return
        tensors = self.cache.tensors()
        if not self.host:
            self.host = [torch.empty(host_pages, *t.shape[1:], dtype=t.dtype, pin_memory=self.gpu) for t in tensors]
        for device, host in zip(tensors, self.host, strict=True):
            for page, kept in out:
                host[kept].copy_(device[page], non_blocking=True)
            for kept, page in back:
                device[page].copy_(host[kept], non_blocking=True)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages, from and to."""
        if pairs:
            made = self.send(np.asarray(pairs, np.int64).T)
            self.cache.copy(made[0], made[1])

    @torch.inference_mode()
    def launch(self, rows: list[Row], masks: np.ndarray | None = None, keep_logits: bool = False) -> Launched:
        """Compute a step, rows with one new token or with guesses first; returns while the device works. `masks`: the bits of
        tokens allowed."""
        behind = guesses(rows)
        recorded = self._recorded(rows) if self.records and not keep_logits else None
        if any(row.count > 1 for row in rows):
            rows = [single for row in rows for single in (row.singles() if recorded or row.single else [row])]
        decodes = sum(row.count == 1 for row in rows)
        decoded: Tensor | None = None
        found: Tensor | tuple[Tensor, Tensor]
        if recorded:
            found, decoded = self._decode(rows, *recorded)
        else:
            found = self._mixed(rows, decodes, keep_logits)
        launched = Launched(None, [])
        if isinstance(found, tuple):
            logits, launched.logits = found
        else:
            logits = found
        if not self.model.last:
            return launched
        launched.slots, positions = sampled(rows)
        if not launched.slots:
            return launched
        plain = masks is None and self.sampler.is_plain(launched.slots)
        if decoded is not None and plain:
            launched.picked = Picked(decoded)
        else:
            self.sampler.prepare()
            there = self.send(np.asarray((launched.slots, positions), np.int32))
            if plain:
                launched.picked = Picked(self.sampler.pick_plain(logits, there[0], there[1]))
            else:
                allowed = None if masks is None else self.send(masks)
                launched.picked = self.sampler.pick(logits, launched.slots, there[0], there[1], allowed, behind)
        self.sampler.add_logprobs(launched.picked, logits, launched.slots)
        if self.gpu:
            launched.picked = launched.picked.to_host()
            launched.done = torch.cuda.Event()
            launched.done.record()
        launched.tokens = launched.picked.tokens
        return launched

    def _mixed(self, rows: list[Row], decodes: int, keep_logits: bool) -> Tensor | tuple[Tensor, Tensor]:
        """Any step, launched kernel by kernel: the logits of the tokens sampled after, or what a stage hands on."""
        counts = np.asarray([row.count for row in rows], np.int32)
        starts = np.asarray([row.start for row in rows], np.int32)
        ends = counts.cumsum(dtype=np.int32)
        total = int(ends[-1])
        tokens = np.zeros(total, np.int32)
        positions = np.arange(total, dtype=np.int32) - np.repeat(ends - counts - starts, counts)
        unknown = []
        for row, end in zip(rows, ends.tolist(), strict=True):
            if row.tokens is None:
                unknown.append(end - 1)
            else:
                tokens[end - row.count : end] = row.tokens
        wanted = [
            end - row.samples + n for row, end in zip(rows, ends.tolist(), strict=True) for n in range(row.samples)
        ]
        # One message to the device: slots, starts, bounds, and of each token its value and position.
        head = len(rows)
        packed = self.send(
            np.concatenate(
                ([row.slot for row in rows], starts, [0], ends, tokens, positions, wanted, unknown),
                dtype=np.int32,
                casting="unsafe",
            )
        )
        slots, starts_there, bounds, tokens_there, positions_there, wanted_there, unknown_there = packed.split(
            (head, head, head + 1, total, total, len(wanted), len(unknown))
        )
        ids = tokens_there.long()
        if unknown:  # rows that decode come first, so a row's number is its token's
            ids[unknown_there.long()] = self.sampler.last[slots[unknown_there.long()].long()]
        others = rows[decodes:]
        batch = PagedBatch(
            self.table, slots, starts_there, bounds, decodes, tuple(row.count for row in others),
            int((starts + counts).max()), positions_there, shared=len({row.slot for row in rows[:decodes]}) < decodes,
        )  # fmt: skip
        asked = wanted_there.long()
        if 0 < self.fused == len(self.model.layers) and self.model.last and not keep_logits:
            batch.wanted = asked
        self.cache.begin(batch)
        kept: list[Tensor] = []

        def finish(x: Tensor, weight: Tensor) -> Tensor:
            if keep_logits:
                kept.append(self._logits(x[0], weight))
                return kept[0][asked]
            return self._logits(x[0] if batch.wanted is not None else x[0][asked], weight)

        x = ids
        if not self.model.first:
            assert self.peers is not None
            x = self.peers.receive(torch.empty(total, self.model.config.hidden, dtype=self.dtype, device=self.device))
        scores = self.model(x[None], positions_there[None], cache=self.cache, finish=finish).result
        if not self.model.last:
            self._hand_on(scores[0])
            return scores[0]
        return (scores, kept[0]) if keep_logits else scores

    def _hand_on(self, x: Tensor) -> None:
        """The residual stream to the next stage."""
        assert self.peers is not None
        self.peers.send(x)

    def _logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Of all tokens, also where this rank has a part of the head."""
        logits = self.unembed(x, weight)
        return logits if self.peers is None else self.peers.gather(logits, self.model.config.vocab)

    def warm(self, step_tokens: int) -> None:
        """Record all steps now, the largest first: the smaller ones then use its memory. Otherwise each is when it is needed. And
        compile what steps with prompts use, in the largest such step there may be."""
        if not self.gpu:
            return
        with torch.inference_mode():
            if self.records and not self.model.invariant:
                tune(self.model, self.gemms, sorted({*self.sizes, *self.shared_sizes}))
            wanted = [(size, False) for size in self.sizes] + [(size, True) for size in self.shared_sizes]
            for size, shared in sorted(wanted if self.records else (), reverse=True):
                if (size, shared) not in self.graphs:
                    self._record(size, shared)
            most = min(self.longest, step_tokens)
            prompts = [Row(0, 0, [0] * most, most, 1)] * (step_tokens // most)
            self._mixed(prompts, 0, False)
            for count in (count for count in SHORT if count <= most):
                self._mixed([Row(0, 1, [0], 1, 1), Row(0, 0, [0] * count, count, 1)], 1, False)
            # And prompts beside sequences that decode, as most steps have them; what they write belongs to no one yet.
            beside = [Row(slot, 1, None, 1, 1) for slot in range(1, min(BESIDE, self.sequences) + 1)]
            each = min(most, max(1, step_tokens // 16))
            self.launch([*beside, *[Row(0, 0, [0] * each, each, 1)] * max(1, (step_tokens - len(beside)) // each)])
            load_kernels(self.model, range(15, min(self.sequences, 512), 16), self.unembed)
            torch.cuda.synchronize()

    def _recorded(self, rows: list[Row]) -> tuple[int, bool] | None:
        """The recorded step that computes these rows, by its size and whether some tokens are of one sequence; None where there is
        none, or kernels for prompts are faster."""
        tokens = sum(row.count for row in rows)
        shared = tokens > len(rows)
        if any(row.count > 1 + self.drafts for row in rows):
            keys = sum(row.count * (2 * row.start + row.count + 1) // 2 for row in rows)
            if not is_short(tokens, keys):
                return None
        size = next((size for size in (self.shared_sizes if shared else self.sizes) if size >= tokens), 0)
        return (size, shared) if size else None

    def _decode(self, rows: list[Row], size: int, shared: bool) -> tuple[Tensor, Tensor]:
        """A step of single tokens, replayed: logits of those that are sampled after, and tokens picked of them without regard to
        more than temperatures; or what a stage hands on. `shared`: some are of one sequence."""
        if (size, shared) not in self.graphs:
            self._record(size, shared)
        self.sampler.prepare()
        replay, inputs, hidden, logits, tokens = self.graphs[size, shared]
        if not self.model.first:
            assert self.peers is not None
            self.peers.receive(hidden[: len(rows)])
        host = np.zeros((3, size), np.int32)
        host[0, : len(rows)] = [row.slot for row in rows]
        host[1, : len(rows)] = [row.start for row in rows]
        host[2, : len(rows)] = [PICKED if row.tokens is None else row.tokens[0] for row in rows]
        inputs.copy_(on_host(host, self.device), non_blocking=True)
        replay()
        if not self.model.last:  # what is on its way must stay when this is replayed
            self._hand_on(logits[: len(rows)].clone())
        wanted = [n for n, row in enumerate(rows) if row.samples]
        if not self.model.last or len(wanted) == len(rows):
            return logits[: len(rows)], tokens[: len(rows)]
        # All tokens were picked for, and the last of a slot may be any of its.
        asked, slots = self.send(np.asarray((wanted, [rows[n].slot for n in wanted]), np.int64))
        picked = tokens[asked]
        self.sampler.last[slots] = picked.clamp(min=0)
        return logits[asked], picked

    def _record(self, size: int, shared: bool) -> None:
        """Record the step for so many tokens."""
        inputs = torch.zeros(3, size, dtype=torch.int32, device=self.device)
        bounds = torch.arange(size + 1, dtype=torch.int32, device=self.device)
        hidden = torch.zeros(
            0 if self.model.first else size, self.model.config.hidden, dtype=self.dtype, device=self.device
        )

        def compute() -> tuple[Tensor, Tensor]:
            slots, starts, known = inputs.unbind()
            # Blocks may write to what they are given.
            x = hidden.clone()
            if self.model.first:
                x = torch.where(known == PICKED, self.sampler.last[slots.long()], known)
            batch = PagedBatch(
                self.table, slots, starts, bounds, size, (), self.longest, starts, tiles=tiles, shared=shared
            )
            self.cache.begin(batch)
            made = self.model(x[None], starts[None], cache=self.cache, finish=lambda x, w: self._logits(x[0], w)).result
            if not self.model.last:
                return made[0], slots
            return made, self.sampler.pick_plain(made, slots, starts, ahead=1)

        tiles: dict[int, Tensor] = {}
        self.graphs[size, shared] = self.capture(compute, inputs, hidden)
        self.read_by_graphs += [bounds, *tiles.values()]

    def capture(self, compute: Callable[[], tuple[Tensor, Tensor]], inputs: Tensor, hidden: Tensor) -> Recorded:
        """Record what is computed of these inputs."""
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            compute()  # compiles kernels, and allocates what they keep
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's own threads may ask for events meanwhile, which is no part of the recording.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            logits, tokens = compute()
        self.pool = self.pool or graph.pool()  # one step is replayed at a time, so all use the same memory
        return graph.replay, inputs, hidden, logits, tokens

    def send(self, array: np.ndarray) -> Tensor:
        """To the device, without waiting for it."""
        return send(array, self.device)
