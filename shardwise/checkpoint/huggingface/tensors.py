"""The mapping between our tensors and theirs in Hugging Face files, and how their layouts differ.

The names of our tensors come from the network itself, so none can be forgotten; a table gives the name of each in the files of its
family. A `Link` connects the two and converts either side to the other, one chunk at a time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.reader import Reader
from shardwise.model.rope import rotated_width
from shardwise.run import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Link:
    """One tensor on each side, in the same layout."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]

    def their_shape(self, shape: Shape) -> Shape:
        """The shape of their tensor (or of each), from that of ours."""
        return shape

    def to_ours(self, name: str, source: Reader) -> Iterator[Tensor]:
        """Our tensor `name`, from theirs."""
        yield source.get(self.theirs[0])

    def to_theirs(self, name: str, source: Reader) -> Iterator[Tensor]:
        """Their tensor `name`, from ours."""
        yield source.get(self.ours[0])


class Fused(Link):
    """GPT-2 stores its matrices transposed, [in, out], with q, k and v side by side in one, and their biases in one vector."""

    def their_shape(self, shape: Shape) -> Shape:
        return (*shape[1:], len(self.ours) * shape[0])

    def to_ours(self, name: str, source: Reader) -> Iterator[Tensor]:
        yield source.get(self.theirs[0]).t().chunk(len(self.ours))[self.ours.index(name)]

    def to_theirs(self, name: str, source: Reader) -> Iterator[Tensor]:
        yield torch.cat([source.get(ours) for ours in self.ours]).t()


class Stacked(Link):
    """Their files store each expert's matrix as a separate tensor."""

    def their_shape(self, shape: Shape) -> Shape:
        return shape[1:]

    def to_ours(self, name: str, source: Reader) -> Iterator[Tensor]:
        for theirs in self.theirs:
            yield source.get(theirs)

    def to_theirs(self, name: str, source: Reader) -> Iterator[Tensor]:
        yield source.row(self.ours[0], self.theirs.index(name))


@dataclass(frozen=True)
class Interleaved(Link):
    """In DeepSeek's files the two rows of a rotary pair are adjacent; in ours there is one in each half of the rotated rows. Rows
    come in groups (a head, or the whole matrix) whose last `rotated` rows are those pairs."""

    unrotated: int
    rotated: int

    def to_ours(self, name: str, source: Reader) -> Iterator[Tensor]:
        yield self.reordered(source.get(self.theirs[0]), (self.rotated // 2, 2))

    def to_theirs(self, name: str, source: Reader) -> Iterator[Tensor]:
        yield self.reordered(source.get(self.ours[0]), (2, self.rotated // 2))

    def reordered(self, rows: Tensor, pairs: tuple[int, int]) -> Tensor:
        """The rows with each rotary pair made adjacent, or separated."""
        groups = rows.unflatten(0, (-1, self.unrotated + self.rotated))
        unrotated, rotated = groups.split((self.unrotated, self.rotated), dim=1)
        reordered = rotated.unflatten(1, pairs).transpose(1, 2).flatten(1, 2)
        return torch.cat((unrotated, reordered), dim=1).flatten(0, 1)


@dataclass(frozen=True)
class FusedHeads(Link):
    """GPT-NeoX and BLOOM store q, k and v in one matrix, head by head. In their files, the first `rotated` rows of a query or key
    head are the two halves of its rotary pairs. In ours, each half of the head's rows begins with one half of the pairs, followed
    by unrotated rows."""

    heads: int
    rotated: int

    def their_shape(self, shape: Shape) -> Shape:
        return (3 * shape[0], *shape[1:])

    def to_ours(self, name: str, source: Reader) -> Iterator[Tensor]:
        theirs = source.get(self.theirs[0])
        yield theirs[self.rows(len(theirs))[self.ours.index(name)]]

    def to_theirs(self, name: str, source: Reader) -> Iterator[Tensor]:
        ours = torch.cat([source.get(ours) for ours in self.ours])
        yield ours[self.rows_back(len(ours))]

    def rows(self, count: int) -> list[Tensor]:
        """For q, k and v, the index of their row for each of ours."""
        heads = torch.arange(count).unflatten(0, (self.heads, 3, -1))
        order = self.order(heads.shape[2])
        return [(heads[:, n] if n == 2 else heads[:, n, order]).flatten() for n in range(3)]

    def rows_back(self, count: int) -> Tensor:
        """For each of their rows, its index in ours, one after the other."""
        return torch.argsort(torch.cat(self.rows(count)))

    def order(self, width: int) -> list[int]:
        """The index of their row for each of ours."""
        half, still = self.rotated // 2, list(range(self.rotated, width))
        middle = width // 2 - half
        return [*range(half), *still[:middle], *range(half, self.rotated), *still[middle:]]


class Shifted(Link):
    """Gemma stores a norm's weight minus 1. Added to 1, 16 bits would not hold all its digits, so ours is in float32."""

    def to_ours(self, name: str, source: Reader) -> Iterator[Tensor]:
        yield source.get(self.theirs[0]).float() + 1.0

    def to_theirs(self, name: str, source: Reader) -> Iterator[Tensor]:
        yield source.get(self.ours[0]).float() - 1.0


_GPT = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "attention_norm": "ln_1",
    "attention.out": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
}
_OPT = {
    "embed": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
    "attention_norm": "self_attn_layer_norm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.out_proj",
    "ffn_norm": "final_layer_norm",
    "ffn.up": "fc1",
    "ffn.down": "fc2",
}
_NEOX = {
    "embed": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
    "attention_norm": "input_layernorm",
    "attention.out": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn.up": "mlp.dense_h_to_4h",
    "ffn.down": "mlp.dense_4h_to_h",
}
_BLOOM = _NEOX | {
    "embed": "transformer.word_embeddings",
    "embed_norm": "transformer.word_embeddings_layernorm",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "attention.out": "self_attention.dense",
}
_OTHERS = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
    "ffn.router": "mlp.gate",
    "ffn.experts.gate": "mlp.experts.{}.gate_proj",
    "ffn.experts.up": "mlp.experts.{}.up_proj",
    "ffn.experts.down": "mlp.experts.{}.down_proj",
    "ffn.shared.gate": "mlp.shared_experts.gate_proj",
    "ffn.shared.up": "mlp.shared_experts.up_proj",
    "ffn.shared.down": "mlp.shared_experts.down_proj",
}
_MIXTRAL = {
    "ffn.router": "block_sparse_moe.gate",
    "ffn.experts.gate": "block_sparse_moe.experts.{}.w1",
    "ffn.experts.up": "block_sparse_moe.experts.{}.w3",
    "ffn.experts.down": "block_sparse_moe.experts.{}.w2",
}
_LATENT = {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv": "self_attn.kv_b_proj",
}


def links(config: ModelConfig, ours: Iterable[str], interleaved: bool = True) -> Iterator[Link]:
    """How each of the network's tensors is stored in the files of its family, in the order of `ours`. `interleaved`: the rotary
    pairs of latent attention are adjacent there."""
    if is_neox(config):
        table = _NEOX
    elif is_bloom(config):
        table = _BLOOM
    elif is_opt(config):
        table = _OPT
    elif config.position == "learned":
        table = _GPT
    elif config.attention == "latent":
        table = _OTHERS | _LATENT | ({"attention.q": "self_attn.q_b_proj"} if config.q_rank else {})
    else:
        table = _OTHERS | (_MIXTRAL if config.experts and not config.qk_norm else {})
    if config.scores:
        table = table | {"head": "score"}
    above = "model.decoder.layers" if is_opt(config) else "model.layers"
    if fuses_heads(config):
        above = "gpt_neox.layers" if is_neox(config) else "transformer.h"
    kind = Shifted if config.embedding_scale else Link
    for name in ours:
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        if match is None:
            module, leaf = name.rsplit(".", 1)
            yield (kind if module == "norm" else Link)((name,), (f"{table[module]}.{leaf}",))
        else:
            layer = f"{above}.{match[1]}"
            yield from _layer_link(config, name, match[2], layer, table, interleaved)


def links_of_folder(
    config: ModelConfig, ours: Iterable[str], values: Mapping[str, Any], names: Iterable[str]
) -> list[Link]:
    """The same for a folder with these values in its config and tensors of these names. Files of the bare network of GPT-2 and
    BLOOM leave out the prefix of its module."""
    found = list(links(config, ours, interleaved=values.get("rope_interleave") is not False))
    if not any(name.startswith("transformer.") for name in names):
        found = [replace(link, theirs=tuple(t.removeprefix("transformer.") for t in link.theirs)) for link in found]
    return found


def _layer_link(
    config: ModelConfig, name: str, rest: str, layer: str, table: dict[str, str], interleaved: bool
) -> Iterator[Link]:
    if rest in table:  # a stack of experts, which has no `.weight` of its own
        theirs = f"{layer}.{table[rest]}.weight"
        yield Stacked((name,), tuple(theirs.format(e) for e in range(config.experts)))
        return
    module, leaf = rest.rsplit(".", 1)
    gpt = like_gpt2(config)
    if fuses_heads(config) and module in ("attention.q", "attention.k", "attention.v"):
        if module == "attention.q":  # one link serves all three
            fused = tuple(f"{name.removesuffix(f'q.{leaf}')}{letter}.{leaf}" for letter in "qkv")
            if gpt:
                yield Fused(fused, (f"{layer}.attn.c_attn.{leaf}",))
            else:
                rotated = rotated_width(config.rope_share, config.head_dim) if is_neox(config) else 0
                above = "attention" if is_neox(config) else "self_attention"
                yield FusedHeads(fused, (f"{layer}.{above}.query_key_value.{leaf}",), config.heads, rotated)
        return
    theirs = f"{layer}.{table[module]}.{'e_score_correction_bias' if rest == 'ffn.router.bias' else leaf}"
    if gpt and leaf == "weight" and not module.endswith("norm"):
        yield Fused((name,), (theirs,))
    elif config.attention == "latent" and interleaved and module == "attention.q":
        yield Interleaved((name,), (theirs,), config.nope_dim, config.rope_dim)
    elif config.attention == "latent" and interleaved and module == "attention.kv_down":
        yield Interleaved((name,), (theirs,), config.kv_rank, config.rope_dim)
    elif config.embedding_scale and module.endswith("norm"):
        yield Shifted((name,), (theirs,))
    else:
        yield Link((name,), (theirs,))


def is_opt(config: ModelConfig) -> bool:
    """Whether a network is of the OPT family, whose files are not laid out like GPT-2's."""
    return config.position == "learned" and config.activation == "relu"


def is_neox(config: ModelConfig) -> bool:
    """Whether a network is of the GPT-NeoX family."""
    return config.position == "rotary" and config.parallel_block and config.has_ffn_norm


def is_bloom(config: ModelConfig) -> bool:
    """Whether a network is of the BLOOM family."""
    return config.position == "alibi"


def fuses_heads(config: ModelConfig) -> bool:
    """Whether its files store q, k and v in one matrix."""
    return like_gpt2(config) or is_neox(config) or is_bloom(config)


def like_gpt2(config: ModelConfig) -> bool:
    """Whether its files store matrices transposed, and q, k and v in one."""
    return config.position == "learned" and not is_opt(config)


def left_out(config: ModelConfig, name: str) -> str:
    """The reason why a tensor of their files without a link may be left out, or "" if it may not."""
    if like_gpt2(config) and re.fullmatch(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias", name):
        return "attention masks"
    if is_neox(config) and re.fullmatch(r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias", name):
        return "attention masks"
    if name.endswith("rotary_emb.inv_freq"):
        return "tables of rotary frequencies"
    if name == "lm_head.weight" and config.tied_embeddings:
        return "copy of the embedding (lm_head.weight), to which the output is tied"
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if config.attention == "latent" and layer and int(layer[1]) >= config.layers:
        return "tensors of layers that predict further tokens"
    return ""


def sort_out(names: Iterable[str], reason_of: Callable[[str], str]) -> tuple[list[str], list[str]]:
    """The names for which there is no reason to leave them out, and a note for each reason that there is for others."""
    reasons = {name: reason_of(name) for name in names}
    counts = Counter(reason for reason in reasons.values() if reason)
    return [name for name in reasons if not reasons[name]], [f"{reason} ({n})" for reason, n in counts.items()]
