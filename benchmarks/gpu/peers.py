"""The peers' training steps for `harness.py`: torchtitan's model, compile, sharding (one rank, mixed precision), activation
checkpointing and loss; transformers' Llama plain, compiled and with Liger's kernels. Packages that torchtitan imports for its
data and logs alone need not be there: they are replaced by stand-ins.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.run import ModelConfig, TrainConfig
from shardwise.torch_private import fake_process_group

Train = Callable[[torch.Tensor, torch.Tensor], Any]
TO_THE_STREAM = ("wo", "w2", "o_proj", "down_proj")
"""What peers call the matrices that write to the residual stream."""
NOT_NEEDED = ("datasets", "torchdata", "tensorboard", "einops", "wandb", "tomli", "torchft", "torchao", "tyro")


def same_start(model: torch.nn.Module, layers: int, options: dict[str, str]) -> torch.optim.Optimizer:
    """Give a model initial weights like this project's, and an optimizer with its settings: how much power a matrix product draws,
    and so how fast it is on a chip at its limit, depends on the numbers. `start=own` leaves the weights as they are."""
    train, std = TrainConfig(), ModelConfig().init_std
    if options.get("start") == "own":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for name, parameter in model.named_parameters():
        mine = parameter.detach()
        mine = mine.to_local() if isinstance(mine, DTensor) else mine
        if mine.dim() == 1:
            mine.fill_(1.0)
        else:
            mine.normal_(0, std / (2 * layers) ** 0.5 if name.split(".")[-2] in TO_THE_STREAM else std)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [dict(params=decayed, weight_decay=train.weight_decay), dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps, fused=True)


class _Anything(ModuleType):
    """A module that has every name."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else MagicMock()


class _StandIns(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in NOT_NEEDED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def torchtitan(shape: dict[str, int], seq: int, options: dict[str, str]) -> Train:
    """torchtitan's Llama 3. `checkpoint` is "full", "op" or a number: every so many layers. With `shard` and `tensor` it is the
    first of so many ranks: in a process group that is there already, else in PyTorch's fake one. `stage` leaves out embedding and
    head: then the input is the residual stream, and the output's gradient random."""
    sys.meta_path.append(_StandIns())
    shard, tensor = int(options.get("shard", 1)), int(options.get("tensor", 1))
    if shard * tensor == 1:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        meeting = Path(tempfile.mkdtemp()) / "ranks"  # and not a port, which two cases could not both have
        dist.init_process_group(
            "nccl", init_method=f"file://{meeting}", rank=0, world_size=1, device_id=torch.device("cuda:0")
        )
    elif not dist.is_initialized():
        fake_process_group(0, shard * tensor)
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.components.loss import cross_entropy_loss  # type: ignore[import-not-found]
    from torchtitan.config.job_config import ActivationCheckpoint  # type: ignore[import-not-found]
    from torchtitan.distributed.activation_checkpoint import apply_ac  # type: ignore[import-not-found]
    from torchtitan.models.llama3.infra import parallelize  # type: ignore[import-not-found]
    from torchtitan.models.llama3.model.args import TransformerModelArgs  # type: ignore[import-not-found]
    from torchtitan.models.llama3.model.model import Transformer  # type: ignore[import-not-found]

    # Its width of the feed-forward layer is two thirds of four times the hidden one, times this factor, rounded up.
    factor = shape["ffn"] / (8 * shape["hidden"] / 3)
    sizes = TransformerModelArgs(
        dim=shape["hidden"], n_layers=shape["layers"], n_heads=shape["heads"], n_kv_heads=shape["kv_heads"],
        vocab_size=shape["vocab"], ffn_dim_multiplier=factor, multiple_of=256, max_seq_len=seq, rope_theta=500000,
    )  # fmt: skip
    with torch.device("meta"):
        model = Transformer(sizes)
    width = model.layers["0"].feed_forward.w1.weight.shape[0]
    if width != shape["ffn"]:
        raise SystemExit(f"torchtitan's feed-forward layer came out {width} wide, not {shape['ffn']}")
    if options.get("stage"):
        model.tok_embeddings = model.norm = model.output = None
    mesh = init_device_mesh("cuda", (shard, tensor), mesh_dim_names=("fsdp", "tp"))
    if tensor > 1:
        parallelize.apply_tp(model, mesh["tp"], loss_parallel=True, enable_float8_tensorwise_tp=False)
    how = options.get("checkpoint", "none")
    if how != "none":
        settings = ActivationCheckpoint(
            mode="full" if how == "full" else "selective", selective_ac_option="2" if how == "full" else how
        )
        apply_ac(model, settings, model_compile_enabled=True, op_sac_save_list=parallelize._op_sac_save_list)
    parallelize.apply_compile(model, SimpleNamespace(backend="inductor", enable=True, components=["model", "loss"]))
    parallelize.apply_fsdp(
        model, mesh["fsdp"], param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32, pp_enabled=bool(options.get("stage")), cpu_offload=False,
        reshard_after_forward_policy="default",
    )  # fmt: skip
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cuda"))
    model.train()
    loss_of = torch.compile(cross_entropy_loss)
    optimizer = same_start(model, shape["layers"], options)

    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        if options.get("stage"):
            many = int(options.get("microbatches", 1))
            for number in range(many):
                model.set_requires_gradient_sync(number == many - 1)
                loss = model(x.detach().requires_grad_())
                loss.backward(y)
        else:
            loss = loss_of(model(x), y) / y.numel()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train


def transformers(shape: dict[str, int], seq: int, options: dict[str, str]) -> Train:
    """transformers' Llama under autocast; `compile` compiles it, `checkpointing` recomputes its layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=seq, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).cuda().train()
    if options.get("checkpointing"):
        model.gradient_checkpointing_enable()
    forward = torch.compile(model) if options.get("compile") else model
    optimizer = same_start(model, shape["layers"], options)

    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train


def liger(shape: dict[str, int], seq: int, options: dict[str, str]) -> Train:
    """The same with Liger's kernels."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama  # type: ignore[import-not-found]

    apply_liger_kernel_to_llama()
    return transformers(shape, seq, options)
