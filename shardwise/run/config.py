"""What a job is: typed sections and a name. Every key is declared once, here or in a file of its section (`sections/`), with its
type, default, limits and meaning; `shardwise config --schema` prints these declarations, and the reader checks a
user's file against them.

A 0 that means "derived" is filled in by `shardwise.run.derive`, so a resolved run holds no such 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardwise.run.sections.adapter import AdapterConfig
from shardwise.run.sections.declare import Key, declared, key
from shardwise.run.sections.layout import LayoutConfig
from shardwise.run.sections.memory import MemoryConfig
from shardwise.run.sections.objective import ObjectiveConfig
from shardwise.run.sections.serve import ServeConfig


@dataclass(frozen=True)
class ModelConfig:
    """The network. Without a preset, a Llama-like decoder of the given shape."""

    preset: str = key(
        "", "published model whose shape to start from (`config --presets`); keys given beside it override it"
    )
    layers: int = key(4, "decoder layers; the deepest published network has 1000", least=1, most=4096)
    hidden: int = key(256, "width of the residual stream", least=1)
    heads: int = key(4, "query heads", least=1)
    kv_heads: int = key(0, "key/value heads (grouped-query attention); 0: as many as heads", least=0)
    head_dim: int = key(0, "width of a head; 0: hidden / heads", least=0)
    ffn: int = key(
        0,
        "width of the feed-forward layer; 0: 8/3 hidden in steps of 64 (gated) or 4 hidden",
        least=0,
    )
    vocab: int = key(
        257,
        "rows of the embedding, at least the tokenizer's size; if not set, that of data.sets (257: bytes and end of document)",
        least=1,
    )
    max_positions: int = key(0, "longest sequence the model is made for; 0: train.seq_len", least=0)
    norm: Literal["rmsnorm", "layernorm"] = key("rmsnorm", "kind of normalisation before each block")
    norm_eps: float = key(1e-5, "added to the variance in norms", above=0)
    activation: Literal["swiglu", "geglu", "gelu", "gelu_erf", "relu", "relu2"] = key(
        "swiglu",
        "feed-forward: gated by SiLU or GELU, or plain GELU (tanh form, as GPT-2), exact GELU (Pythia), ReLU, squared ReLU",
    )
    bias: Literal["none", "qkv", "all"] = key(
        "none", "biases: none (Llama), on q, k and v (Qwen2.5), on every matrix (GPT)"
    )
    position: Literal["rotary", "learned", "alibi"] = key(
        "rotary",
        "how positions enter: rotated queries and keys, a learned table, or biases of the scores that fall with the distance "
        "(ALiBi)",
    )
    position_offset: int = key(
        0, "rows of the table of learned positions before that of the first token (OPT: 2)", least=0
    )
    rope_theta: float = key(10000.0, "base of the rotary frequencies", above=0)
    rope_share: float = key(
        1.0, "share of a head's pairs that are rotated; the others keep still (GPT-NeoX: 0.25)", above=0, most=1
    )
    rope_scaling: Literal["none", "llama3", "yarn"] = key(
        "none", "how rotary frequencies stretch beyond the trained length"
    )
    rope_factor: float = key(1.0, "how many times longer than rope_original the context became", least=1)
    rope_original: int = key(0, "context length before stretching; 0: max_positions", least=0)
    rope_low_freq: float = key(
        1.0, "llama3 scaling: wavelengths longer than rope_original/this are stretched fully", above=0
    )
    rope_high_freq: float = key(4.0, "llama3 scaling: wavelengths shorter than rope_original/this are kept", above=0)
    yarn_beta_fast: float = key(32.0, "YaRN: rotations over rope_original above which a frequency is kept", above=0)
    yarn_beta_slow: float = key(1.0, "YaRN: rotations over rope_original below which a frequency is stretched", above=0)
    yarn_mscale: float = key(1.0, "YaRN: weight of the logarithmic growth of rotary amplitude", least=0)
    yarn_mscale_all: float = key(0.0, "YaRN: the same growth applied to all attention scores (DeepSeek)", least=0)
    qk_norm: bool = key(False, "normalise each head of queries and keys (Qwen3)")
    parallel_block: bool = key(False, "attention and feed-forward side by side, from one norm (GPT-J, PaLM)")
    parallel_norms: int = key(
        1, "parallel block: one norm for both of its parts, or 2: one each (GPT-NeoX)", least=1, most=2
    )
    embedding_scale: bool = key(False, "multiply embeddings by the square root of hidden (Gemma)")
    embedding_norm: bool = key(False, "normalise embeddings before the first layer (BLOOM)")
    sliding_window: int = key(0, "attend to this many latest positions only; 0: to all", least=0)
    tied_embeddings: bool = key(False, "share the embedding with the output head")
    init_std: float = key(0.02, "standard deviation of initial weights", above=0)
    attention: Literal["grouped", "latent"] = key(
        "grouped", "multi-head/grouped-query attention, or DeepSeek's latent attention"
    )
    q_rank: int = key(0, "latent attention: rank of the compressed queries; 0: not compressed", least=0)
    kv_rank: int = key(0, "latent attention: rank of the compressed keys and values", least=0)
    nope_dim: int = key(0, "latent attention: width of a head's part without position", least=0)
    rope_dim: int = key(0, "latent attention: width of a head's rotated part, shared by all heads in the keys", least=0)
    v_dim: int = key(0, "latent attention: width of a head's values", least=0)
    experts: int = key(0, "routed experts in each MoE layer; 0: a dense model", least=0)
    experts_per_token: int = key(0, "routed experts each token goes to", least=0)
    expert_ffn: int = key(0, "width of one expert; 0: ffn", least=0)
    shared_experts: int = key(0, "experts every token passes (one block of this many times expert_ffn)", least=0)
    dense_layers: int = key(0, "MoE: first layers that stay dense", least=0)
    router: Literal["softmax", "sigmoid"] = key(
        "softmax", "scores of the experts: softmax (Mixtral), sigmoid with bias (DeepSeek-V3)"
    )
    router_groups: int = key(1, "groups of experts that routing first chooses among", least=1)
    router_top_groups: int = key(1, "groups a token may use", least=1)
    router_normalize: bool = key(True, "make the weights of a token's chosen experts add up to one")
    router_scale: float = key(1.0, "factor on the routed experts' output", above=0)
    expert_capacity: float = key(
        0.0, "an expert takes at most this many times its even share of a sequence, and drops the rest; 0: all", least=0
    )
    scores: bool = key(False, "the head gives a score of each token instead of logits; objective.kind = reward sets it")

    @property
    def head_rows(self) -> int:
        """Rows of the head's matrix."""
        return 1 if self.scores else self.vocab

    @property
    def has_ffn_norm(self) -> bool:
        """Whether the feed-forward layer has a norm of its own."""
        return not self.parallel_block or self.parallel_norms > 1

    @property
    def gated(self) -> bool:
        """Whether a feed-forward layer has a gate beside its first matrix."""
        return self.activation in ("swiglu", "geglu")

    @property
    def key_dim(self) -> int:
        """Width of a head's queries and keys as attention takes them: with ALiBi they also hold slope and position
        (`model/alibi.py`), in as many elements as keep the width a multiple of 8 that kernels want."""
        return self.head_dim + 8 * (self.position == "alibi")

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.v_dim if self.attention == "latent" else self.head_dim

    @property
    def moe_layers(self) -> int:
        """How many layers are MoE layers."""
        return self.layers - self.dense_layers if self.experts else 0

    def is_moe(self, layer: int) -> bool:
        """Whether a layer is an MoE layer."""
        return bool(self.experts) and layer >= self.dense_layers


@dataclass(frozen=True)
class DataConfig:
    """What is learned from. Without sets, the built-in corpus of texts that ship with Python, as bytes."""

    sets: tuple[str, ...] = key((), "folders made by `shardwise data build`; empty: the built-in corpus")
    weights: tuple[float, ...] = key((), "share of samples from each set; empty: by their tokens")
    validation: tuple[str, ...] = key((), "folders to evaluate on; empty: hold out the end of each set")
    holdout: float = key(0.01, "share of each set held out when there is no validation set", least=0, most=0.5)
    separate_documents: bool = key(
        False, "keep attention and positions inside each packed document; always so for conversations"
    )


@dataclass(frozen=True)
class TrainConfig:
    """How it is learned. A global batch is microbatch x accumulation x data ranks sequences."""

    steps: int = key(1000, "optimizer steps", least=1)
    global_batch: int = key(32, "sequences in a step, over all ranks", least=1)
    microbatch: int = key(
        0,
        "sequences in one forward pass of a rank; 0: a rank's whole share of the batch, or what a search finds best",
        least=0,
    )
    seq_len: int = key(512, "tokens in a sequence", least=1)
    seed: int = key(0, "fixes the initial weights and the order of the data", least=0)
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = key(
        "float32",
        "arithmetic of the network; the 16-bit ones keep parameters, gradients and optimizer in float32",
    )
    fp8: Literal["none", "tensorwise", "rowwise"] = key(
        "none",
        "GEMMs inside of the layers in fp8: one scale a tensor and all GEMMs, the fastest; or one a row, the "
        "weights' gradients in 16 bits, the closest to 16 bits",
    )
    weights: str = key(
        "",
        "checkpoint, run folder, or what `shardwise convert from-hf` made, whose weights training begins with; empty: random ones",
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "where to run; auto: the GPU where there is one")
    backend: Literal["auto", "nccl", "gloo"] = key("auto", "of collectives; auto: nccl on GPUs; gloo can share them")
    compile: Literal["auto", True, False] = key(
        "auto",
        "fuse each layer's small kernels with torch.compile; the first step takes longer; auto: so on one GPU in 16 bits",
    )
    cuda_graph: Literal["auto", True, False] = key(
        "auto",
        "one GPU: record the passes of a step once and replay them, which keeps their memory; auto: where launching them "
        "was seen to take the host longer than computing them takes the GPU",
    )
    tune_products: Literal["auto", True, False] = key(
        "auto",
        "one GPU in 16 bits: draw the library's algorithms for large GEMMs in the first steps, and take the fastest, "
        "which all give the same; compiled layers also accumulate sums in the GEMMs, which rounds once less",
    )
    invariant: bool = key(
        False,
        "forward passes that give a token the same bits whatever the batch, which are those of serve.invariant; slower",
    )
    deterministic: bool = key(False, "GPUs: two runs identical to the bit, at some cost in speed; CPUs always are")
    parametrization: Literal["standard", "mup"] = key(
        "standard",
        "how initial values and learning rates depend on the width; mup: the best learning rate is the same at every width",
    )
    base_width: int = key(256, "mup: the hidden size at which learning rates are the standard ones", least=1)
    base_layers: int = key(
        0, "mup: the depth at which learning rates are the standard ones; 0: they do not depend on it", least=0
    )
    optimizer: Literal["adamw", "muon"] = key("adamw", "muon: orthogonalised momentum on matrices, AdamW on the rest")
    lr: float = key(3e-4, "peak learning rate of AdamW", above=0)
    muon_lr: float = key(0.02, "peak learning rate of Muon's matrices", above=0)
    muon_momentum: float = key(0.95, "Muon's momentum", least=0, most=1)
    weight_decay: float = key(0.1, "decoupled decay; norms, biases and the like are never decayed", least=0)
    beta1: float = key(0.9, "AdamW's first moment", least=0, most=1)
    beta2: float = key(0.95, "AdamW's second moment", least=0, most=1)
    eps: float = key(1e-8, "AdamW's epsilon", above=0)
    clip: float = key(1.0, "largest gradient norm; 0: no clipping", least=0)
    schedule: Literal["cosine", "linear", "wsd", "constant"] = key(
        "cosine", "learning rate after warm-up; wsd: stable, then decay"
    )
    warmup: int = key(0, "steps of linear warm-up", least=0)
    decay: float = key(0.2, "wsd: share of the steps spent decaying at the end", least=0, most=1)
    final_lr: float = key(0.1, "learning rate at the end, as a share of the peak", least=0, most=1)
    reduce_dtype: Literal["float64", "float32", "bfloat16"] = key(
        "float32",
        "16 bits: dtype in which gradients are added over shards and replicas; higher precision adds in its own",
    )
    loss: Literal["auto", "plain", "chunked"] = key(
        "auto",
        "chunked: scores of the vocabulary for some tokens at a time; auto: so on GPUs in 16 bits, without tensor ranks",
    )
    loss_scale: float = key(65536.0, "float16: first loss scale; it then adapts", above=0)
    balance_loss: float = key(0.0, "MoE: weight of the per-sequence load-balance loss", least=0)
    router_z_loss: float = key(0.0, "MoE: weight of the squared log-partition of router logits", least=0)
    balance_rate: float = key(0.001, "sigmoid router: step of the selection bias towards even load", least=0)
    expert_imbalance: float = key(
        1.1,
        "planning MoE: load of the busiest expert rank over the mean (dropless routing costs 8 to 20%)",
        least=1,
    )
    eval_every: int = key(100, "steps between evaluations, and one at the end; 0: never", least=0)
    eval_sequences: int = key(64, "validation sequences an evaluation looks at", least=1)
    samples: int = key(
        0,
        "texts that are continued at each evaluation and recorded; they begin as validation sequences do",
        least=0,
        most=64,
    )
    sample_tokens: int = key(
        64, "samples: tokens that each is continued by, a forward pass of a microbatch for each", least=1
    )
    checkpoint_every: int = key(0, "steps between checkpoints, besides the one at the end; 0: only that", least=0)
    keep: int = key(2, "checkpoints kept, newest first", least=1)
    keep_every: int = key(0, "checkpoints of steps that this divides are never deleted; 0: none", least=0)
    restarts: int = key(
        3, "restarts after failures with no new checkpoint in between, before the run gives up; 0: none", least=0
    )
    restart_wait: float = key(
        1.0, "seconds before the first restart; doubled for each that follows without a new checkpoint", least=0
    )
    save_deadline: float = key(120.0, "seconds a run may take to save after SIGTERM", above=0)
    hang_seconds: float = key(600.0, "seconds without any progress after which a rank counts as hung", above=0)
    elastic: bool = key(False, "with fewer ranks than the layout needs: plan another layout and go on with that")
    guard: Literal["none", "skip", "rollback", "stop"] = key(
        "stop",
        "what a bad loss or gradient norm leads to: nothing; no update (the host then waits for each norm); back to the "
        "last checkpoint and on without that batch; the end of the run",
    )
    guard_spike: float = key(
        0.0,
        "a finite loss or norm is bad so many deviations (1.4826 x MAD) above the median of guard_window steps; 0: never",
        least=0,
    )
    guard_window: int = key(64, "accepted steps that a spike is measured against", least=8)
    guard_limit: int = key(
        10, "bad steps in a row, or batches left out between two checkpoints, that end the run", least=1
    )
    recheck_every: int = key(
        0, "steps between those computed twice and compared bit for bit, to catch silent corruption; 0: never", least=0
    )
    compare_every: int = key(50, "steps between comparisons of the ranks' own compute time; 0: never", least=0)
    tensorboard: bool = key(False, "also write TensorBoard events to the run folder")
    wandb: str = key("", "also send metrics to this Weights & Biases project; the id is in the run folder (wandb-id)")


@dataclass(frozen=True)
class ClusterConfig:
    """What it runs on. A 0 stands for what is usual for the chip."""

    chip: str = key(
        "", "accelerator by name (`config --chips`), or a TOML file that describes one; empty: this machine"
    )
    nodes: int = key(1, "machines", least=1)
    devices_per_node: int = key(
        0, "accelerators in a machine; 0: what the layout needs, spread evenly (auto: the usual)", least=0
    )
    domain: int = key(0, "devices joined by the fast link, where that is more or less than a machine", least=0)
    intra_gbs: float = key(0.0, "GB/s of a device and direction on the fast link", least=0)
    inter_gbs: float = key(0.0, "GB/s of a device and direction between machines", least=0)
    latency_ms: float = key(
        0.0, "milliseconds that a message takes from one machine to another, where that is more than usual", least=0
    )
    hbm_gbs: float = key(0.0, "GB/s of a device's memory, where it is not the catalogue's", least=0)
    power_w: float = key(0.0, "watts a device is capped at", least=0)
    fabric: Literal["", "rail", "fat-tree", "ethernet", "torus"] = key("", "how machines are joined")
    taper: float = key(1.0, "fat-tree: how many times less bandwidth the upper levels have", least=1)
    sharp: bool = key(False, "whether the network's switches add up all-reduces, as InfiniBand's SHARP does")
    profile: str = key("", "file written by `shardwise bench`, whose measured curves replace the catalogue's")
    rendezvous: str = key(
        "", "HOST:PORT on one of the machines, where those that `shardwise train` was started on meet"
    )
    node_wait: int = key(30, "train.elastic: seconds to wait for further machines before going on without", least=1)
    headroom: float = key(0.05, "share of a device's memory the plan leaves free", least=0, most=0.9)
    price: float = key(0.0, "US dollars for a device and hour; 0: the catalogue's", least=0)
    mtbf_hours: float = key(
        50_000.0, "hours a device works between two failures that stop the run (Llama 3 saw 50,000)", above=0
    )
    restart_seconds: float = key(600.0, "from a failure to the first step after it", least=0)
    storage_gbs: float = key(1.0, "GB/s a machine writes checkpoints and reads data with", above=0)
    host_gbs: float = key(20.0, "GB/s of a device to its host's memory, through which a checkpoint is staged", above=0)


@dataclass(frozen=True)
class Run:
    """One job, the only argument of plan, train and explain."""

    name: str = key("run", "what the run is called; its folder is runs/NAME unless --out says otherwise")
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def accumulation(self) -> int:
        """Microbatches each data rank runs in a step."""
        return self.train.global_batch // (self.train.microbatch * self.layout.data_ranks)

    @property
    def stage_microbatches(self) -> int:
        """Of those, the ones that pass each stage that a rank holds."""
        return self.accumulation // self.layout.directions

    @property
    def batch_tokens(self) -> int:
        """Tokens in one step over all ranks."""
        return self.train.global_batch * self.train.seq_len


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "layout": LayoutConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "objective": ObjectiveConfig,
    "adapter": AdapterConfig,
    "memory": MemoryConfig,
    "serve": ServeConfig,
    "cluster": ClusterConfig,
}


def all_keys() -> dict[str, Key]:
    """Every key a run file may hold: `name`, then `section.key`."""
    keys = {k.name: k for k in declared(Run)}
    for section, cls in SECTIONS.items():
        keys.update({f"{section}.{k.name}": k for k in declared(cls)})
    return keys
