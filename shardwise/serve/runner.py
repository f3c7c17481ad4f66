"""Computes a step of the scheduler on one device: one forward pass over the new tokens of all its sequences, then the sampling of
their next tokens.

Every running sequence has a slot. The device keeps the page table and the last sampled token of each slot. So a decode-only step
needs nothing from the host but slots and positions, and the next step can be launched before the host has seen the sampled tokens.
On a GPU such steps are captured once for several batch sizes, as CUDA graphs, and replayed: launching their kernels one by one
would take longer than running them.
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
from shardwise.serve.host_pages import HostPages
from shardwise.serve.prompts import Wanted, score_prompts
from shardwise.serve.sampler import Picked, Sampler, on_host, send

if TYPE_CHECKING:
    from shardwise.parallel.inference import Peers


SHORT = (2, 15, 31, 63, 127, 255)
"""Prompt tokens that `warm` computes beside one decoding token: quantized matrices have a different kernel for each."""

BESIDE = 40
"""Decoding sequences in the step that `warm` runs to compile the kernels of mixed steps."""

Recorded = tuple[Callable[[], None], Tensor, Tensor, Tensor, Tensor]
"""A captured step: its replay function, its inputs, and the logits and tokens that it makes, each in static memory."""
PICKED = -1
"""Stands for the token that was sampled last, which only the device knows."""


@dataclass(slots=True)
class Row:
    """The new tokens of one sequence in a step."""

    slot: int
    start: int
    """Tokens of the sequence that are in the KV cache already."""
    tokens: Sequence[int] | None
    """The new tokens; None: the token sampled last, which only the device knows yet."""
    count: int
    samples: int
    """How many of the new tokens, counted from the end, sample a next token: all of them if they are a token and drafts to
    verify."""
    wanted: Wanted | None = None
    """Tokens of its prompt whose logprobs are asked for."""

    @property
    def single(self) -> bool:
        """Whether its tokens are computed as rows of one token each, which attend to each other."""
        return self.count in (1, self.samples)

    def singles(self) -> list[Row]:
        """One row for each token."""
        if self.count == 1 or self.tokens is None:
            return [self]
        first = self.count - self.samples
        return [Row(self.slot, self.start + n, [token], 1, int(n >= first)) for n, token in enumerate(self.tokens)]


@dataclass
class Launched:
    """A launched step."""

    picked: Picked | None
    """The sampled tokens of all rows that sample, one row after the other."""
    slots: list[int] = field(default_factory=list)
    logits: Picked | None = None
    """What was kept of the logits of prompts: the logprobs that rows want, one row after the other."""
    done: torch.cuda.Event | None = None
    tokens: Tensor | None = None
    """The sampled tokens, on the host once the step is done."""

    def read(self) -> list[int]:
        """The sampled tokens; waits for the step."""
        if self.done is not None:
            self.done.synchronize()
        return [] if self.tokens is None else self.tokens.tolist()


def guesses(rows: Sequence[Row]) -> list[Sequence[int]]:
    """For each sampled token, the drafts before it; an empty list if no row has drafts."""
    if all(row.samples < 2 for row in rows):
        return []
    return [() if row.tokens is None else row.tokens[1 : n + 1] for row in rows for n in range(row.samples)]


def sampled(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """The slots for which a step samples tokens, and the position of each sampled token."""
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
    """A model with its KV cache, slots and sampler. Page 0 and slot 0 belong to no sequence: padding uses them."""

    stages = 1
    """Steps that are computed at the same time, one in each pipeline stage."""

    def __init__(
        self, model: Transformer, pages: int, page_tokens: int, sequences: int, longest: int, kv_dtype: torch.dtype,
        peers: Peers | None = None, drafts: int = 0,
    ) -> None:  # fmt: skip
        """`peers`: the ranks that hold the other shards of the model. `drafts`: draft tokens of a sequence that one step
        verifies."""
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
        self.host = HostPages(self.cache.tensors())
        self.drafts, self.sizes, self.shared_sizes = drafts, graph_sizes(sequences), shared_sizes(sequences, drafts)
        self.pool: Any = None
        self.graphs: dict[tuple[int, bool], Recorded] = {}
        """Captured steps, by number of rows and by whether several rows belong to one sequence."""
        self.read_by_graphs: list[Tensor] = []
        """Tensors that captured kernels read besides their inputs; they must live as long as the graphs."""

    def set_pages(self, changes: Sequence[tuple[int, int, int]]) -> None:
        """Update the page table with (slot, index, page): pages that sequences use from now on."""
        if changes:
            made = self.send(np.asarray(changes, np.int64).T)
            self.table[made[0], made[1]] = made[2].int()

    def swap(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]], host_pages: int) -> None:
        """Copy pages `out` to host memory, which has room for `host_pages`, and others `back` to the device."""
        self.host.swap(out, back, host_pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages; each pair is (from, to)."""
        if pairs:
            made = self.send(np.asarray(pairs, np.int64).T)
            self.cache.copy(made[0], made[1])

    @torch.inference_mode()
    def launch(self, rows: list[Row], masks: np.ndarray | None = None, keep_logits: bool = False) -> Launched:
        """Launch a step, in which rows with one new token or with drafts come first; returns while the device works. `masks`: the
        bits of the allowed tokens. `keep_logits`: whether a row wants logprobs of its prompt."""
        behind = guesses(rows)
        recorded = self._recorded(rows) if self.records and not keep_logits else None
        if any(row.count > 1 for row in rows):
            rows = [single for row in rows for single in (row.singles() if recorded or row.single else [row])]
        decodes = sum(row.count == 1 for row in rows)
        decoded: Tensor | None = None
        kept: Picked | None = None
        if recorded:
            logits, decoded = self._decode(rows, *recorded)
        else:
            logits, kept = self._mixed(rows, decodes, keep_logits)
        launched = Launched(None, logits=kept)
        if not self.model.last:
            return launched
        launched.slots, positions = sampled(rows)
        if launched.slots:
            launched.picked = self._pick(logits, decoded, launched.slots, positions, masks, behind)
        if self.gpu and (launched.picked or kept):
            launched.picked = launched.picked and launched.picked.to_host()
            launched.logits = kept and kept.to_host()
            launched.done = torch.cuda.Event()
            launched.done.record()
        launched.tokens = None if launched.picked is None else launched.picked.tokens
        return launched

    def _pick(
        self, logits: Tensor, decoded: Tensor | None, slots: list[int], positions: list[int], masks: np.ndarray | None,
        behind: Sequence[Sequence[int]],
    ) -> Picked:  # fmt: skip
        """Sample from the logits of these slots. `decoded`: tokens that were sampled from them by their temperature alone."""
        plain = masks is None and self.sampler.is_plain(slots)
        if decoded is not None and plain:
            picked = Picked(decoded)
        else:
            self.sampler.prepare()
            there = self.send(np.asarray((slots, positions), np.int32))
            if plain:
                picked = Picked(self.sampler.pick_plain(logits, there[0], there[1]))
            else:
                allowed = None if masks is None else self.send(masks)
                picked = self.sampler.pick(logits, slots, there[0], there[1], allowed, behind)
        self.sampler.add_logprobs(picked, logits, slots)
        return picked

    def _mixed(self, rows: list[Row], decodes: int, keep_logits: bool) -> tuple[Tensor, Picked | None]:
        """Any step, launched kernel by kernel: returns the logits to sample from, or the residual stream that a stage sends on; and
        what rows want to know of their prompts."""
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
        # One transfer to the device: slots, starts, bounds, token ids, positions, indices of sampled and unknown ones.
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
        if unknown:  # decoding rows come first, so a row's index is its token's index
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
        kept: list[Picked] = []

        def finish(x: Tensor, weight: Tensor) -> Tensor:
            if keep_logits:
                pairs = zip(rows, (ends - counts).tolist(), strict=True)
                prompts = [(start, row.wanted) for row, start in pairs if row.wanted]
                kept.append(score_prompts(x[0], prompts, lambda some: self._logits(some, weight), self.model.invariant))
            return self._logits(x[0] if batch.wanted is not None else x[0][asked], weight)

        x = ids
        if not self.model.first:
            assert self.peers is not None
            x = self.peers.receive(torch.empty(total, self.model.config.hidden, dtype=self.dtype, device=self.device))
        scores = self.model(x[None], positions_there[None], cache=self.cache, finish=finish).result
        if not self.model.last:
            self._hand_on(scores[0])
            return scores[0], None
        return scores, kept[0] if kept else None

    def _hand_on(self, x: Tensor) -> None:
        """Send the residual stream to the next stage."""
        assert self.peers is not None
        self.peers.send(x)

    def _logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Logits over the full vocabulary, also where this rank holds a shard of the head."""
        logits = self.unembed(x, weight)
        return logits if self.peers is None else self.peers.gather(logits, self.model.config.vocab)

    def warm(self, step_tokens: int, host_pages: int = 0) -> None:
        """Capture all CUDA graphs now, the largest first, so that the smaller ones reuse its memory; without this, each is
        captured when it is first needed. Also compile the kernels of steps with prompts, in the largest step that can occur, and
        allocate room for the pages that may be swapped to the host."""
        self.host.allocate(host_pages)
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
            prompts = [Row(0, 0, [0] * most, most, 1)] * min(step_tokens // most, self.sequences)
            self._mixed(prompts, 0, False)
            for count in (count for count in SHORT if count <= most):
                self._mixed([Row(0, 1, [0], 1, 1), Row(0, 0, [0] * count, count, 1)], 1, False)
            # Prompts beside decoding sequences, as in most steps; the pages they write to belong to no sequence yet.
            beside = [Row(slot, 1, None, 1, 1) for slot in range(1, min(BESIDE, self.sequences - 1) + 1)]
            others = min(16, self.sequences - len(beside))
            each = min(most, max(1, (step_tokens - len(beside)) // others))
            self.launch([*beside, *[Row(0, 0, [0] * each, each, 1)] * others])
            load_kernels(self.model, range(15, min(self.sequences, 512), 16), self.unembed)
            torch.cuda.synchronize()

    def _recorded(self, rows: list[Row]) -> tuple[int, bool] | None:
        """The captured step for these rows: its size, and whether several tokens belong to one sequence. None if there is none, or
        if the kernels for prompts are faster."""
        tokens = sum(row.count for row in rows)
        shared = tokens > len(rows)
        if any(row.count > 1 + self.drafts for row in rows):
            keys = sum(row.count * (2 * row.start + row.count + 1) // 2 for row in rows)
            if not is_short(tokens, keys):
                return None
        size = next((size for size in (self.shared_sizes if shared else self.sizes) if size >= tokens), 0)
        return (size, shared) if size else None

    def _decode(self, rows: list[Row], size: int, shared: bool) -> tuple[Tensor, Tensor]:
        """Replay a step of single tokens. Returns the logits of the rows that sample, and the tokens sampled from them with no
        parameter but the temperature; or the residual stream that a stage sends on. `shared`: several rows belong to one
        sequence."""
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
        if not self.model.last:  # the next replay must not overwrite a tensor that is still being sent
            self._hand_on(logits[: len(rows)].clone())
        wanted = [n for n, row in enumerate(rows) if row.samples]
        if not self.model.last or len(wanted) == len(rows):
            return logits[: len(rows)], tokens[: len(rows)]
        # The graph sampled for every row, so the last token of a slot may come from any of its rows: set it again.
        asked, slots = self.send(np.asarray((wanted, [rows[n].slot for n in wanted]), np.int64))
        picked = tokens[asked]
        self.sampler.last[slots] = picked.clamp(min=0)
        return logits[asked], picked

    def _record(self, size: int, shared: bool) -> None:
        """Capture the step for this number of tokens."""
        inputs = torch.zeros(3, size, dtype=torch.int32, device=self.device)
        bounds = torch.arange(size + 1, dtype=torch.int32, device=self.device)
        hidden = torch.zeros(
            0 if self.model.first else size, self.model.config.hidden, dtype=self.dtype, device=self.device
        )

        def compute() -> tuple[Tensor, Tensor]:
            slots, starts, known = inputs.unbind()
            # Blocks may write to their input.
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
        """Capture a computation on these inputs as a CUDA graph."""
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            compute()  # compiles kernels, and allocates their buffers
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's own threads may query events meanwhile, which is not part of the capture.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            logits, tokens = compute()
        self.pool = self.pool or graph.pool()  # one graph is replayed at a time, so all share one memory pool
        return graph.replay, inputs, hidden, logits, tokens

    def send(self, array: np.ndarray) -> Tensor:
        """Copy to the device, without a host sync."""
        return send(array, self.device)
