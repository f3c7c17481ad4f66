"""How many parameters a model has and how many operations it takes, as closed forms of its configuration.

The one place where these are counted: the planner, the trainer's utilisation and the reports all read them here. Counts
carry their convention, since "FLOPs" alone means four different things in the literature.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.run import ModelConfig

CONVENTION = "model FLOPs: causal attention, head in, embedding lookup out, recomputation out"


@dataclass(frozen=True)
class Parameters:
    """Parameters by part, over all layers; `active` are those one token meets."""

    embedding: int
    attention: int
    dense_ffn: int
    router: int
    experts: int
    shared_experts: int
    norms: int
    head: int
    active_experts: int

    @property
    def total(self) -> int:
        """All parameters, tied ones once."""
        parts = (
            self.embedding,
            self.attention,
            self.dense_ffn,
            self.router,
            self.experts,
            self.shared_experts,
        )
        return sum(parts) + self.norms + self.head

    @property
    def active(self) -> int:
        """Parameters that one token meets."""
        return self.total - self.experts + self.active_experts


def attention_parameters(model: ModelConfig) -> tuple[int, int]:
    """Of one layer: numbers in matrices, and in biases and inner norms."""
    m = model
    if m.attention == "latent":
        queries = m.q_rank * (m.hidden + m.heads * m.head_dim) if m.q_rank else m.hidden * m.heads * m.head_dim
        down = m.hidden * (m.kv_rank + m.rope_dim)
        up = m.kv_rank * m.heads * (m.nope_dim + m.v_dim)
        return queries + down + up + m.heads * m.v_dim * m.hidden, m.q_rank + m.kv_rank
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    biases = 0 if m.bias == "none" else q + 2 * kv
    if m.bias == "all":
        biases += m.hidden
    return m.hidden * (2 * q + 2 * kv), biases + (2 * m.head_dim if m.qk_norm else 0)


def feed_forward_parameters(model: ModelConfig, width: int) -> tuple[int, int]:
    """Of one layer of that width: numbers in matrices, and in biases."""
    matrices = 3 if model.gated else 2
    return matrices * model.hidden * width, (matrices - 1) * width + model.hidden if model.bias == "all" else 0


def parameters(model: ModelConfig) -> Parameters:
    """Parameters of the whole model, exact."""
    m = model
    routed = m.layers - m.dense_layers if m.experts else 0
    expert = feed_forward_parameters(m, m.expert_ffn)[0]
    norm = m.hidden * (2 if m.norm == "layernorm" else 1)
    return Parameters(
        embedding=m.vocab * m.hidden + (m.max_positions * m.hidden if m.position == "learned" else 0),
        attention=m.layers * sum(attention_parameters(m)),
        dense_ffn=(m.layers - routed) * sum(feed_forward_parameters(m, m.ffn)),
        router=routed * m.experts * m.hidden,
        experts=routed * m.experts * expert,
        shared_experts=routed * m.shared_experts * expert,
        norms=(2 * m.layers + 1) * norm,
        head=0 if m.tied_embeddings else m.vocab * m.hidden,
        active_experts=routed * m.experts_per_token * expert,
    )


def keys_seen(model: ModelConfig, seq_len: int) -> float:
    """Keys a query sees on average under the causal mask and the sliding window."""
    window = min(model.sliding_window or seq_len, seq_len)
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def forward_flops(model: ModelConfig, seq_len: int) -> float:
    """Operations of one token's forward pass, a multiply-add as two."""
    m, p = model, parameters(model)
    routed = m.layers - m.dense_layers if m.experts else 0
    matrices = m.layers * attention_parameters(m)[0]
    matrices += (m.layers - routed) * feed_forward_parameters(m, m.ffn)[0]
    matrices += p.router + p.shared_experts + p.active_experts + m.vocab * m.hidden
    v_dim = m.v_dim if m.attention == "latent" else m.head_dim
    attention = m.layers * m.heads * (m.head_dim + v_dim) * keys_seen(m, seq_len)
    return 2.0 * (matrices + attention)


def training_flops(model: ModelConfig, seq_len: int) -> float:
    """Operations of one token in training: the backward pass costs twice the forward pass."""
    return 3.0 * forward_flops(model, seq_len)
