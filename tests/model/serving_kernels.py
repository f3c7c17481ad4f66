"""What `test_paged.py` and `tests/serve/test_sampler.py` run in a process of its own, in which Triton's interpreter stands for the
GPU: the kernels of serving against plain PyTorch."""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from patience import HANG_SECONDS

from shardwise.model import Transformer, initialize
from shardwise.model.fused import fuse, load_kernels
from shardwise.model.gemm.decoding import DecodingGemms
from shardwise.model.invariant.network import make_invariant
from shardwise.model.kernels.attention.decode import Scratch, decode_attention
from shardwise.model.kernels.attention.latent import Tile, latent_attention, latent_scratch
from shardwise.model.kernels.attention.paged import paged_attention, rope_write, tiles_of
from shardwise.model.kernels.attention.tiles import DecodeTile, PromptTile, prompt_tile
from shardwise.model.kernels.gated import gated_product
from shardwise.model.kernels.gemm.skinny import skinny_gemm, skinny_gemm_reference
from shardwise.model.kernels.rms_norm import rms_norm
from shardwise.model.kernels.sample import Picking, find_threshold, pick, token_logprob
from shardwise.model.paged import PagedBatch, PagedCache, paged_attention_reference
from shardwise.model.rope import apply_rope, rope_cos_sin
from shardwise.run import LayoutConfig, ModelConfig
from shardwise.run.derive import derive_model
from shardwise.run.parameters import find_parameter
from shardwise.run.ranks.served import ServingRank
from shardwise.serve import sampler

CPU = torch.device("cpu")


def attention(
    heads: int, kv_heads: int, width: int, page: int, window: int, norms: bool, starts: list[int], counts: list[int],
    guesses: bool = False, decoding: DecodeTile | None = None, prompts: PromptTile | None = None,
) -> None:  # fmt: skip
    pages, sequences, tokens = 80, len(starts), sum(counts)
    keys = torch.randn(pages, kv_heads, page, width)
    values = torch.randn_like(keys)
    free = iter((torch.randperm(pages - 1) + 1).tolist())
    slots = torch.randperm(sequences + 1)[:sequences].int() + 1
    table = torch.zeros(sequences + 2, 32, dtype=torch.int32)
    for slot, start, count in zip(slots.tolist(), starts, counts, strict=True):
        for n in range(-(-(start + count) // page)):
            table[slot, n] = -1 if window and (n + 1) * page <= start + 1 - window else next(free)
    decodes = sum(count == 1 for count in counts)
    positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]).int()
    begins = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    old = torch.tensor(starts, dtype=torch.int32)
    longest = max(s + c for s, c in zip(starts, counts, strict=True))
    batch = PagedBatch(table, slots, old, begins, decodes, tuple(counts[decodes:]), longest, positions)
    angles = torch.arange(600).double()[:, None] * 10000.0 ** -(torch.arange(0, width, 2).double() / width)
    rope = angles.cos().float(), angles.sin().float()
    weights = torch.rand(width) + 0.5, torch.rand(width) + 0.5, 1e-5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * width)

    q, k, v = (
        x.unflatten(1, (-1, width)) for x in qkv.split((heads * width, kv_heads * width, kv_heads * width), dim=1)
    )
    if norms:
        q, k = (F.rms_norm(x, (width,), weight, 1e-5) for x, weight in zip((q, k), weights[:2], strict=True))
    turns = tuple(torch.cat((x, x), dim=-1)[positions.long()][None, :, None] for x in rope)
    q, k = (apply_rope(x[None], (turns[0], turns[1]))[0] for x in (q, k))
    wanted_keys, wanted_values, places = keys.clone(), values.clone(), batch.places(page)
    wanted_keys[places // page, :, places % page] = k
    wanted_values[places // page, :, places % page] = v
    wanted = paged_attention_reference(q, wanted_keys, wanted_values, batch, width**-0.5, window)

    arguments = (rope, weights if norms else None, keys, values)
    if guesses:  # of each sequence all tokens are single ones, whose keys are written first
        scratch = Scratch(tokens, heads, kv_heads, width, CPU)
        rope_write(qkv, *arguments, places, positions, heads)
        each = slots.repeat_interleave(torch.tensor(counts))
        found = decode_attention(
            qkv, None, None, keys, values, table, each, positions, scratch, heads, width**-0.5, window
        )
        assert not scratch.arrived.any()
    elif decodes == sequences:
        scratch = Scratch(sequences, heads, kv_heads, width, CPU)
        found = decode_attention(qkv, *arguments, table, slots, old, scratch, heads, width**-0.5, window, tile=decoding)
        assert not scratch.arrived.any()
    else:
        rope_write(qkv, *arguments, places, positions, heads)
        found = torch.empty(tokens, heads, width)
        tile = prompts or prompt_tile(max(counts), width, CPU)
        tiles = torch.tensor(tiles_of(tuple(counts), tile.rows), dtype=torch.int32)
        turned = qkv[:, : heads * width].unflatten(1, (-1, width))
        paged_attention(turned, keys, values, table, slots, old, begins, tiles, tile, found, width**-0.5, window)
    torch.testing.assert_close(found.view_as(wanted), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys, wanted_keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values, wanted_values)


def attentions() -> None:
    draw = random.Random(0)
    attention(8, 2, 32, 16, 0, False, [0, 5, 100, 300], [1] * 4)
    attention(4, 4, 32, 16, 0, True, [37, 290], [1] * 2)
    attention(8, 1, 64, 16, 50, True, [0, 5, 100, 300], [1] * 4)
    attention(8, 2, 32, 16, 0, True, [5, 0, 30], [1, 70, 65])
    attention(8, 2, 32, 16, 20, False, [5, 0, 64], [1, 70, 3])
    attention(4, 2, 32, 64, 0, False, [5, 0, 200], [1, 65, 3])
    attention(4, 1, 32, 128, 90, True, [0, 200], [70, 140])
    attention(8, 2, 32, 16, 0, True, [5, 0, 300, 126], [1, 4, 3, 5], guesses=True)
    attention(4, 1, 32, 8, 20, False, [230, 37, 14], [1, 3, 5], guesses=True)
    attention(
        4, 2, 32, 64, 0, False, [0, 63, 64, 200, 500], [1] * 5, decoding=DecodeTile(32, 4, 2)
    )  # tiles within a page
    attention(4, 2, 32, 64, 70, True, [5, 300], [1] * 2, decoding=DecodeTile(64, 4, 2))
    attention(4, 2, 32, 64, 0, False, [0, 100], [150, 40], prompts=PromptTile(128, 128, 8, 2))
    for _ in range(2):
        counts = sorted(draw.choices([1, 1, 2, 9, 40], k=3))
        starts = [draw.choice([0, 3, 16, 33, 90]) for _ in counts]
        attention(
            4,
            draw.choice([1, 2, 4]),
            32,
            draw.choice([8, 16]),
            draw.choice([0, 0, 24]),
            draw.random() < 0.5,
            starts,
            counts,
        )


def latent(
    heads: int, rank: int, rope: int, page: int, window: int, starts: list[int], tile: Tile | None = None
) -> None:
    """Single tokens over latents, whose own are in their pages; some of one sequence, as guesses are."""
    pages, width, sequences = 80, rank + rope, len(starts)
    keys = torch.randn(pages, 1, page, width)
    keys[0] = float("nan")  # what belongs to no one is not seen
    free = iter((torch.randperm(pages - 1) + 1).tolist())
    slots, old = torch.randperm(sequences).int() + 1, torch.tensor(starts, dtype=torch.int32)
    table = torch.zeros(sequences + 2, 40, dtype=torch.int32)
    for slot, start in zip(slots.tolist(), starts, strict=True):
        for n in range(-(-(start + 1) // page)):
            table[slot, n] = -1 if window and (n + 1) * page <= start + 1 - window else next(free)
    slots, old = torch.cat((slots, slots[-1:])), torch.cat((old, (old[-1:] - 1).clamp(min=0)))
    begins, q = torch.arange(sequences + 2, dtype=torch.int32), torch.randn(sequences + 1, heads, width)
    batch = PagedBatch(table, slots, old, begins, sequences + 1, (), max(starts) + 1, old, shared=True)
    wanted = paged_attention_reference(q, keys, keys[..., :rank], batch, width**-0.5, window)
    scratch = latent_scratch(sequences + 1, heads, rank, CPU, tile)
    found = latent_attention(q, keys, rank, table, slots, old, scratch, width**-0.5, window, tile=tile)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not scratch.arrived.any()


def latents() -> None:
    latent(4, 32, 16, 16, 0, [0, 5, 100, 600])
    latent(20, 24, 8, 8, 0, [37, 300], Tile(16, 16, 4, 2))  # several blocks of heads, sizes that are no powers of two
    latent(4, 32, 16, 16, 50, [0, 33, 500], Tile(16, 32, 4, 2))


def gemms() -> None:
    for gated in ("", "silu", "gelu"):
        for rows, (n, k) in ((1, (24, 2048)), (1, (20, 700)), (1, (6, 1024))):
            x, weight, norm = torch.randn(rows, k), torch.randn(n, k) * 0.05, torch.rand(k)
            residual = torch.randn(rows, n // 2 if gated else n)
            for before in (None, (norm, 1e-5)):
                after = residual if bool(before) == (n % 4 == 0) else None
                found = skinny_gemm(x, weight, before, after, gated)
                wanted = skinny_gemm_reference(x, weight, before, after, gated)
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    x, weight = torch.randn(5, 700)[:, :600], torch.rand(600)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (600,), weight, 1e-5), rtol=1e-5, atol=1e-6)
    x = torch.randn(3, 2 * 2500)
    gate, up = x.chunk(2, dim=1)
    torch.testing.assert_close(gated_product(gate, up, "silu"), F.silu(gate) * up, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        gated_product(gate, up, "gelu"), F.gelu(gate, approximate="tanh") * up, rtol=1e-5, atol=1e-6
    )


def near_draw() -> None:
    """Two tokens whose scores with noise differ by little, the winner in a later tile and with a `v` just above a power of two,
    where the bound of its noise is tightest: the same token whether one program takes both tiles or not."""
    seed, position, winner = 7, 109, 7265
    words = sampler.words_of(torch.tensor([seed]), torch.tensor([position]))
    noise = sampler.gumbel(words, 8192)[0]
    logits = torch.full((1, 8192), -60.0)
    logits[0, winner], logits[0, 0] = 0.0, float(noise[winner] - noise[0]) - 2.6e-4
    assert sampler.pick_reference(logits, torch.ones(1), words).tolist() == [winner]
    for rows in (1, 133):  # in 32 programs, and in one
        many, slots = logits.expand(rows, -1).contiguous(), torch.zeros(rows, dtype=torch.int32)
        positions, last = torch.full((rows,), position, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        seeds, picking = torch.tensor([seed]), Picking(rows, CPU)
        assert pick(many, slots, positions, 0, torch.ones(1), seeds, None, last, picking).unique().tolist() == [winner]


def sample() -> None:
    near_draw()
    logits = torch.randn(9, 2500) * 3
    logits[6, 7], logits[7], logits[8, 5] = float("nan"), float("-inf"), float("inf")
    slots = torch.randperm(9).int()
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.0, 1.5, 0.2, 1.0, 0.5, 0.0])
    seeds = torch.randint(-(2**62), 2**62, (9,))
    top_k = torch.tensor([0, 0, 50, 0, 40, 0, 0, 0, 0])
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.8, 0.5, 0.9, 1.0, 1.0, 1.0])
    min_p = torch.tensor([0, 0, 0, 0, 0.01, 0.1, 0, 0, 0])
    which, positions = slots.long(), torch.arange(9).int() * 7
    settings = (temperature[which], top_k[which], top_p[which], min_p[which])
    words = sampler.words_of(seeds[which], positions + 1)
    good = slice(0, 6)
    found, wanted = find_threshold(logits, *settings), sampler.thresholds(logits, *settings)
    cuts = (settings[1] > 0) | (settings[2] < 1) | (settings[3] > 0)
    torch.testing.assert_close(found[good][cuts[good]], wanted[good][cuts[good]])
    last, picking = torch.zeros(9, dtype=torch.int64), Picking(9, CPU)
    for mine, plain in ((found, wanted), (None, None)):
        tokens = pick(logits, slots, positions, 1, temperature, seeds, mine, last, picking)
        expected = sampler.pick_reference(logits, settings[0], words, plain)
        assert tokens[good].tolist() == expected[good].tolist()
        assert last[which].tolist() == tokens.clamp(min=0).tolist()
    assert tokens[6:].tolist() == expected[6:].tolist() == [-1, -1, -1]
    assert not picking.arrived.any()
    divided = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 0.1])
    for rows in (6, 1):
        made = token_logprob(logits[:rows], tokens[:rows], divided[:rows])
        scores = (logits[:rows].double() / divided[:rows, None]).log_softmax(-1)
        torch.testing.assert_close(made, scores.gather(1, tokens[:rows, None])[:, 0].float(), rtol=1e-5, atol=1e-5)


class Turns:
    """Two ranks as threads of which one runs at a time, until it has made its part of a sum; then the other goes on."""

    def __init__(self) -> None:
        self.turn, self.parts = threading.Condition(), {0: torch.empty(0), 1: torch.empty(0)}
        self.whose = 0

    def take(self, rank: int) -> None:
        with self.turn:
            assert self.turn.wait_for(lambda: self.whose == rank, HANG_SECONDS)

    def give(self, rank: int) -> None:
        with self.turn:
            self.whose = 1 - rank
            self.turn.notify_all()

    def add_up(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self.parts[rank] = x.clone()
        self.give(rank)
        self.take(rank)
        if rank == 0:  # the first to go on; the other finds the sum when this one has its part of the next
            self.sum = self.parts[0] + self.parts[1]
        return x.copy_(self.sum)


def cut(rows: int, invariant: bool) -> None:
    """A fused block cut over two ranks, which add up what they made, is the block."""
    sizes = dict(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=32, ffn=16, vocab=8)
    config = derive_model(ModelConfig(**sizes, qk_norm=True), 64)
    whole = Transformer(config).eval().requires_grad_(False)
    initialize(whole, config, 0)
    for parameter in whole.parameters():
        if parameter.ndim > 1:
            parameter *= 8
    if invariant:
        make_invariant(whole)
    slots, begins = torch.arange(1, rows + 1, dtype=torch.int32), torch.arange(rows + 1, dtype=torch.int32)
    table = torch.arange(8 * 4, dtype=torch.int32).view(8, 4) + 1
    positions = torch.arange(rows, dtype=torch.int32) + 3
    x = torch.randn(1, rows, config.hidden)

    def cache_of(heads: int) -> PagedCache:
        cache = PagedCache(config, 1, 40, 16, torch.float32, CPU, 8, heads, invariant)
        cache.begin(PagedBatch(table, slots, positions, begins, rows, (), 16, positions))
        return cache

    rope = rope_cos_sin(config, positions[None], torch.float32)
    wanted, _ = whole.layers["0"](x, rope, None, cache_of(1).layers[0])
    turns, found = Turns(), {}

    def run(rank: int) -> None:
        turns.take(rank)
        place = ServingRank(LayoutConfig(tensor=2), rank)
        part = Transformer(config).eval().requires_grad_(False)
        for name, owner, leaf in [(n, *_owner(part, n)) for n, _ in part.named_parameters()]:
            offset, size = place.box(find_parameter(config, name))
            value = whole.get_parameter(name)[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
            setattr(owner, leaf, torch.nn.Parameter(value.clone(), requires_grad=False))
        if invariant:
            make_invariant(part)
        fuse(part, 64, DecodingGemms(), lambda x: turns.add_up(rank, x), rank == 0)
        load_kernels(part, [2], torch.nn.functional.linear)
        found[rank] = part.layers["0"](x.clone(), None, None, cache_of(place.kv_heads(config)).layers[0])[0]
        turns.give(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wanted - x).abs().max() > 0.1, "what is added matters"
    for rank in range(2):
        torch.testing.assert_close(found[rank], wanted, rtol=1e-4, atol=1e-4)


def cuts() -> None:
    for rows in (1, 3):  # the kernels of few rows, and those of more
        cut(rows, invariant=False)
        cut(rows, invariant=True)


def _owner(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:]:
        {"attention": attentions, "latent": latents, "gemm": gemms, "sample": sample, "cut": cuts}[name]()
