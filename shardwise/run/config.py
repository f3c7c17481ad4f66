"""What a job is: typed sections and a name. Every key is declared once, here or in a file of its section (`sections/`), with its
type, default, limits and meaning; `shardwise config --schema` prints these declarations, and the reader checks a
user's file against them.

A 0 that means "derived" is filled in by `shardwise.run.derive`, so a resolved run holds no such 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_type_hints

from shardwise.run.sections.adapter import AdapterConfig
from shardwise.run.sections.declare import Key, declared, key
from shardwise.run.sections.layout import LayoutConfig
from shardwise.run.sections.memory import MemoryConfig
from shardwise.run.sections.objective import ObjectiveConfig
from shardwise.run.sections.serve import ServeConfig


@dataclass(frozen=True)
class ModelConfig:
    """The network. Without a preset, a Llama-like decoder of the given shape."""

    preset: str = key("", "published model to start from (`config --presets`); other keys of this section override it")
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
        "rows of the embedding, at least the tokenizer's size; if not set, the size of data.sets (257: bytes and end of document)",
        least=1,
    )
    max_positions: int = key(0, "longest sequence of the model; 0: train.seq_len", least=0)
    norm: Literal["rmsnorm", "layernorm"] = key("rmsnorm", "normalisation before attention and feed-forward")
    norm_eps: float = key(1e-5, "added to the variance in norms", above=0)
    activation: Literal["swiglu", "geglu", "gelu", "gelu_erf", "relu", "relu2"] = key(
        "swiglu",
        "activation of the feed-forward layer: gated SiLU or GELU; tanh GELU (GPT-2), exact GELU (Pythia), ReLU, squared ReLU",
    )
    bias: Literal["none", "qkv", "all"] = key(
        "none", "biases: none (Llama), on q, k and v (Qwen2.5), on every matrix (GPT)"
    )
    position: Literal["rotary", "learned", "alibi"] = key(
        "rotary",
        "rotary: rotate queries and keys (RoPE); learned: a table of position embeddings; alibi: attention biases that fall with "
        "distance (ALiBi)",
    )
    position_offset: int = key(0, "learned: first row of the position table that is used (OPT: 2)", least=0)
    rope_theta: float = key(10000.0, "base of the rotary frequencies", above=0)
    rope_share: float = key(1.0, "share of each head that is rotated (GPT-NeoX: 0.25)", above=0, most=1)
    rope_scaling: Literal["none", "llama3", "yarn"] = key(
        "none", "how rotary frequencies are scaled beyond the trained length"
    )
    rope_factor: float = key(1.0, "context length over rope_original", least=1)
    rope_original: int = key(0, "context length before scaling; 0: max_positions", least=0)
    rope_low_freq: float = key(1.0, "llama3: wavelengths above rope_original / this are scaled fully", above=0)
    rope_high_freq: float = key(4.0, "llama3: wavelengths below rope_original / this are not scaled", above=0)
    yarn_beta_fast: float = key(
        32.0, "YaRN: frequencies with more rotations over rope_original than this are not scaled", above=0
    )
    yarn_beta_slow: float = key(
        1.0, "YaRN: frequencies with fewer rotations over rope_original than this are scaled fully", above=0
    )
    yarn_mscale: float = key(1.0, "YaRN: weight of the logarithmic growth of rotary amplitude", least=0)
    yarn_mscale_all: float = key(0.0, "YaRN: the same growth applied to all attention scores (DeepSeek)", least=0)
    qk_norm: bool = key(False, "normalise the queries and keys of each head (Qwen3)")
    parallel_block: bool = key(False, "run attention and feed-forward in parallel, after one norm (GPT-J, PaLM)")
    parallel_norms: int = key(
        1, "parallel block: 1: one norm for both parts; 2: one norm each (GPT-NeoX)", least=1, most=2
    )
    embedding_scale: bool = key(False, "multiply embeddings by the square root of hidden (Gemma)")
    embedding_norm: bool = key(False, "normalise embeddings before the first layer (BLOOM)")
    sliding_window: int = key(0, "attend only to this many latest positions; 0: to all", least=0)
    tied_embeddings: bool = key(False, "share the embedding with the output head")
    init_std: float = key(0.02, "standard deviation of initial weights", above=0)
    attention: Literal["grouped", "latent"] = key(
        "grouped", "grouped: multi-head or grouped-query attention; latent: DeepSeek's latent attention (MLA)"
    )
    q_rank: int = key(0, "latent attention: rank of the compressed queries; 0: not compressed", least=0)
    kv_rank: int = key(0, "latent attention: rank of the compressed keys and values", least=0)
    nope_dim: int = key(0, "latent attention: width of a head's part without position", least=0)
    rope_dim: int = key(0, "latent attention: width of a head's rotated part; all heads share it in the keys", least=0)
    v_dim: int = key(0, "latent attention: width of a head's values", least=0)
    experts: int = key(0, "routed experts in each MoE layer; 0: a dense model", least=0)
    experts_per_token: int = key(0, "routed experts per token (top-k)", least=0)
    expert_ffn: int = key(0, "width of one expert; 0: ffn", least=0)
    shared_experts: int = key(
        0, "shared experts, which every token passes (one block of this many times expert_ffn)", least=0
    )
    dense_layers: int = key(0, "MoE: number of dense layers at the start", least=0)
    router: Literal["softmax", "sigmoid"] = key(
        "softmax", "how experts are scored: softmax (Mixtral), or sigmoid with bias (DeepSeek-V3)"
    )
    router_groups: int = key(1, "groups of experts; routing chooses groups first", least=1)
    router_top_groups: int = key(1, "groups of experts per token", least=1)
    router_normalize: bool = key(True, "normalise the weights of a token's experts to a sum of 1")
    router_scale: float = key(1.0, "factor on the routed experts' output", above=0)
    expert_capacity: float = key(
        0.0,
        "capacity factor: an expert drops tokens beyond this many times its even share of a sequence; 0: drop none",
        least=0,
        most=1e6,
    )
    scores: bool = key(False, "the head outputs a score per token instead of logits; objective.kind = reward sets it")

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

    sets: tuple[str, ...] = key((), "folders from `shardwise data build`; empty: the built-in corpus")
    weights: tuple[float, ...] = key((), "share of samples from each set; empty: by their tokens")
    validation: tuple[str, ...] = key((), "folders to evaluate on; empty: the held-out end of each set")
    holdout: float = key(0.01, "share of each set to hold out when there is no validation set", least=0, most=0.5)
    separate_documents: bool = key(
        False, "keep attention and positions within each packed document; conversations always do"
    )


@dataclass(frozen=True)
class TrainConfig:
    """How it is learned. A global batch is microbatch x accumulation x data ranks sequences."""

    steps: int = key(1000, "optimizer steps", least=1)
    global_batch: int = key(32, "sequences per step, over all ranks", least=1)
    microbatch: int = key(
        0,
        "sequences per forward pass of a rank; 0: the rank's whole share of the batch, or what a search finds best",
        least=0,
    )
    seq_len: int = key(512, "tokens per sequence", least=1)
    seed: int = key(0, "seed of the initial weights and the data order", least=0)
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = key(
        "float32",
        "dtype of the computation; with 16 bits, parameters, gradients and optimizer state stay in float32",
    )
    fp8: Literal["none", "tensorwise", "rowwise"] = key(
        "none",
        "fp8 GEMMs in the layers; tensorwise: one scale per tensor, all GEMMs, fastest; rowwise: one scale per row, weight "
        "gradients in 16 bits, most accurate",
    )
    weights: str = key(
        "",
        "initial weights: a checkpoint, a run folder, or the output of `shardwise convert from-hf`; empty: random",
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "where to run; auto: the GPU if there is one")
    backend: Literal["auto", "nccl", "gloo"] = key(
        "auto", "backend of collectives; auto: nccl on GPUs, else gloo; with gloo, ranks can share a GPU"
    )
    compile: Literal["auto", True, False] = key(
        "auto",
        "compile each layer and the last norm with torch.compile; the first step takes longer; "
        "auto: on GPUs in 16 bits, where no other key excludes it",
    )
    cuda_graph: Literal["auto", True, False] = key(
        "auto",
        "one GPU: record a step as a CUDA graph and replay it, which keeps its memory; auto: if the first steps show that "
        "launching kernels takes the host longer than running them takes the GPU",
    )
    tune_products: Literal["auto", True, False] = key(
        "auto",
        "one GPU in 16 bits: try the library's algorithms for large GEMMs in the first steps and keep the fastest; all give "
        "the same result; compiled layers also accumulate sums in the GEMM, which rounds once less",
    )
    invariant: bool = key(
        False,
        "batch-invariant forward passes: a token gets the same bits in any batch, equal to those of serve.invariant; slower",
    )
    deterministic: bool = key(False, "GPUs: repeat a run bit for bit; slower; CPUs always do")
    parametrization: Literal["standard", "mup"] = key(
        "standard",
        "how initial weights and learning rates scale with width; mup: the best learning rate is the same at every width",
    )
    base_width: int = key(256, "mup: the hidden size at which learning rates equal the standard ones", least=1)
    base_layers: int = key(
        0, "mup: the depth at which learning rates equal the standard ones; 0: no scaling with depth", least=0
    )
    optimizer: Literal["adamw", "muon"] = key("adamw", "muon: orthogonalised momentum on matrices, AdamW on the rest")
    lr: float = key(3e-4, "peak learning rate of AdamW", above=0)
    muon_lr: float = key(0.02, "peak learning rate of Muon's matrices", above=0)
    muon_momentum: float = key(0.95, "Muon's momentum", least=0, most=1)
    weight_decay: float = key(0.1, "decoupled weight decay; norms and biases are never decayed", least=0)
    beta1: float = key(0.9, "AdamW's first moment", least=0, most=1)
    beta2: float = key(0.95, "AdamW's second moment", least=0, most=1)
    eps: float = key(1e-8, "AdamW's epsilon", above=0)
    clip: float = key(1.0, "largest gradient norm; 0: no clipping", least=0)
    schedule: Literal["cosine", "linear", "wsd", "constant"] = key(
        "cosine", "learning rate after warm-up; wsd: constant, then decay (warmup-stable-decay)"
    )
    warmup: int = key(0, "steps of linear warm-up", least=0)
    decay: float = key(0.2, "wsd: share of the steps spent decaying at the end", least=0, most=1)
    final_lr: float = key(0.1, "learning rate at the end, as a share of the peak", least=0, most=1)
    reduce_dtype: Literal["float64", "float32", "bfloat16"] = key(
        "float32",
        "with 16 bits: dtype of the gradient reduction over shards and replicas; other dtypes reduce in their own",
    )
    loss: Literal["auto", "plain", "chunked"] = key(
        "auto",
        "chunked: compute logits for some tokens at a time; auto: on GPUs in 16 bits",
    )
    loss_scale: float = key(65536.0, "float16: initial loss scale; it adapts later", above=0)
    balance_loss: float = key(0.0, "MoE: weight of the per-sequence load-balance loss", least=0)
    router_z_loss: float = key(
        0.0, "MoE: weight of the router z-loss, the squared log-sum-exp of the router logits", least=0
    )
    balance_rate: float = key(0.001, "sigmoid router: step size of the bias that balances the load", least=0)
    expert_imbalance: float = key(
        1.1,
        "for the plan of MoE: load of the busiest expert rank over the mean (dropless routing: 1.08 to 1.2)",
        least=1,
    )
    eval_every: int = key(100, "steps between evaluations; there is also one at the end; 0: never", least=0)
    eval_sequences: int = key(64, "validation sequences per evaluation", least=1)
    samples: int = key(
        0,
        "sample texts per evaluation; each continues the start of a validation sequence",
        least=0,
        most=64,
    )
    sample_tokens: int = key(64, "samples: tokens per sample; each takes a forward pass of a microbatch", least=1)
    checkpoint_every: int = key(
        0, "steps between checkpoints; there is always one at the end; 0: only that one", least=0
    )
    keep: int = key(2, "how many of the newest checkpoints to keep", least=1)
    keep_every: int = key(
        0, "never delete checkpoints whose step is a multiple of this; 0: no such checkpoints", least=0
    )
    restarts: int = key(3, "most restarts in a row without a new checkpoint; then the run gives up; 0: none", least=0)
    restart_wait: float = key(
        1.0, "seconds before the first restart; doubles with each restart without a new checkpoint", least=0
    )
    save_deadline: float = key(120.0, "seconds for the last checkpoint after SIGTERM", above=0)
    hang_seconds: float = key(600.0, "a rank without progress for this many seconds counts as hung", above=0)
    elastic: bool = key(False, "if ranks are missing, plan a smaller layout and continue with it")
    guard: Literal["none", "skip", "rollback", "stop"] = key(
        "stop",
        "reaction to a bad loss or gradient norm; none: ignore it; skip: no update (the host then waits for each norm); rollback: "
        "go back to the last checkpoint and leave out that batch; stop: end the run",
    )
    guard_spike: float = key(
        0.0,
        "a finite loss or norm this many deviations (1.4826 x MAD) above the median of guard_window steps is bad; 0: never",
        least=0,
    )
    guard_window: int = key(64, "accepted steps in the median that defines a spike", least=8)
    guard_limit: int = key(
        10, "the run ends after this many bad steps in a row, or batches left out between two checkpoints", least=1
    )
    recheck_every: int = key(
        0, "compute every n-th step twice and compare bit for bit, to find silent data corruption; 0: never", least=0
    )
    compare_every: int = key(
        50, "steps between comparisons of the ranks' compute times, to find stragglers; 0: never", least=0
    )
    tensorboard: bool = key(False, "also write TensorBoard events to the run folder")
    wandb: str = key("", "also send metrics to this Weights & Biases project; the run folder keeps the id (wandb-id)")


@dataclass(frozen=True)
class ClusterConfig:
    """What it runs on. A 0 stands for what is usual for the chip."""

    chip: str = key(
        "", "accelerator, by name (`config --chips`) or as a TOML file that describes it; empty: this machine"
    )
    nodes: int = key(1, "machines", least=1)
    devices_per_node: int = key(
        0,
        "devices per machine; 0: the layout's ranks spread evenly, or for a search the usual number of the chip",
        least=0,
    )
    domain: int = key(0, "devices in one fast-link (NVLink) domain, if not one machine", least=0)
    intra_gbs: float = key(0.0, "GB/s per device and direction on the fast link", least=0)
    inter_gbs: float = key(0.0, "GB/s per device and direction between machines", least=0)
    latency_ms: float = key(0.0, "milliseconds per message between machines, if more than usual", least=0)
    hbm_gbs: float = key(0.0, "GB/s of a device's memory, if not the catalogue's", least=0)
    power_w: float = key(0.0, "power cap of a device in watts", least=0)
    fabric: Literal["", "rail", "fat-tree", "ethernet", "torus"] = key("", "network between machines")
    taper: float = key(1.0, "fat-tree: oversubscription of the upper levels", least=1)
    sharp: bool = key(False, "the switches do all-reduces in the network (InfiniBand SHARP)")
    profile: str = key("", "file from `shardwise bench`; its measured curves replace the catalogue's")
    rendezvous: str = key("", "HOST:PORT on one machine, where all machines that run `shardwise train` meet")
    node_wait: int = key(30, "train.elastic: seconds to wait for more machines before continuing without them", least=1)
    headroom: float = key(0.05, "share of a device's memory that the plan leaves free", least=0, most=0.9)
    price: float = key(0.0, "US dollars per device and hour; 0: the catalogue's", least=0, most=1e6)
    mtbf_hours: float = key(
        50_000.0, "mean hours between failures of one device that stop the run (Llama 3: 50,000)", least=1e-3, most=1e12
    )
    restart_seconds: float = key(600.0, "seconds from a failure to the first step after it", least=0, most=1e9)
    storage_gbs: float = key(1.0, "GB/s per machine for writing checkpoints and reading data", least=1e-6)
    host_gbs: float = key(20.0, "GB/s from a device to host memory, where a checkpoint is staged", least=1e-6)


@dataclass(frozen=True)
class Run:
    """One job, the only argument of plan, train and explain."""

    name: str = key("run", "name of the run; its folder is runs/NAME unless --out gives another")
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


SECTIONS: dict[str, type] = {name: section for name, section in get_type_hints(Run).items() if name != "name"}


def all_keys() -> dict[str, Key]:
    """Every key a run file may hold: `name`, then `section.key`."""
    own = {k.name: k for k in declared(Run)}
    return own | {f"{section}.{k.name}": k for section, cls in SECTIONS.items() for k in declared(cls)}
