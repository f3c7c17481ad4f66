"""Tuning with adapters on one GPU: tokens a second and the most memory, beside transformers + peft where peft can be imported.

Cases, each in a process of its own so that its peak is its own:

    lora        Llama-3-8B, rank 16 on all matrices, 2 x 4096 tokens, bfloat16
    qlora       the same model in 4 bits, 2 x 2048 tokens, layers recomputed
    qlora-70b   a 70B shape in 4 bits, 1 x 1024 tokens, the process held to 48 GB
    peft        transformers + peft as `lora`, with Liger's kernels where liger_kernel can be imported

    python benchmarks/gpu/lora.py lora qlora qlora-70b peft [--steps 10] [--tune] [--peers FOLDER] [--output lora.json]

Weights are random: the time and the memory do not depend on them. The time is the median of the steps' on the device's clock, once
compiled; memory is what PyTorch's allocator had given out at most (`peak_gib`) and had reserved at most (`reserved_gib`), and all
that the driver counts for the process (`device_gib`, with the CUDA context). Beside them stands what the plan says: the
step's time, and the peak without the context and the allocator's waste.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

GB48 = 48e9
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "lora": dict(model=dict(preset="llama3-8b"), adapter=dict(kind="lora"), train=dict(global_batch=2, seq_len=4096)),
    "qlora": dict(
        model=dict(preset="llama3-8b"),
        adapter=dict(kind="qlora"),
        layout=dict(recompute="full"),
        train=dict(global_batch=2, microbatch=1, seq_len=2048),
    ),
    "qlora-70b": dict(
        model=dict(preset="llama3-70b"),
        adapter=dict(kind="qlora"),
        layout=dict(recompute="full"),
        train=dict(global_batch=1, seq_len=1024),
    ),
}


def measure_ours(case: str, steps: int, tune: bool) -> dict[str, Any]:
    """A run of this trainer."""
    import torch
    from steps import seconds_of

    from shardwise.measure.verify import random_batch
    from shardwise.plan.plan import plan
    from shardwise.run import run_from_dict
    from shardwise.train import cuda_graph, tune_gemms
    from shardwise.train.step import TrainState

    sections = {key: dict(value) for key, value in CASES[case].items()}
    sections["train"] |= dict(dtype="bfloat16", device="cuda", eval_every=0)
    run = run_from_dict(sections | dict(cluster=dict(chip="h200")))
    if case == "qlora-70b":
        torch.cuda.set_per_process_memory_fraction(GB48 / torch.cuda.get_device_properties(0).total_memory)
    state, batch = TrainState(run), random_batch(run)
    started = torch.cuda.max_memory_allocated()
    if tune:
        tune_gemms.attach(state)
    cuda_graph.attach(state)  # as `shardwise train` does
    warm = 350 if tune else 10
    losses, taken = [], []
    for n in range(warm + steps):
        if n == 2:
            torch.cuda.reset_peak_memory_stats()

        def step() -> None:
            losses.append(state.train_step(batch).loss)

        taken.append(seconds_of(step, True))
    planned = plan(run)
    found = dict(case=case, seconds=statistics.median(taken[warm:]), tokens=run.batch_tokens, start_gib=started / 2**30)
    found |= dict(losses=[loss.item() for loss in losses][:: max(1, len(losses) // 4)])
    kept = sum(size for owner, size in planned.account.memory.ranks[0].items() if owner != "workspace")
    found |= dict(planned_s=planned.account.step_seconds, planned_gib=kept / 2**30)
    return found


def measure_peft(steps: int) -> dict[str, Any]:
    """transformers + peft, and Liger where it can be imported."""
    import peft  # type: ignore[import-not-found]
    import torch
    import transformers
    from steps import seconds_of

    name = "peft"
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama  # type: ignore[import-not-found]

        apply_liger_kernel_to_llama()
        name = "peft + liger"
    except ImportError:
        pass
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        settings = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, fused=True)
    tokens, taken = torch.randint(0, 128256, (2, 4096), device="cuda"), []

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for n in range(4 + steps):
        if n == 2:
            torch.cuda.reset_peak_memory_stats()
        taken.append(seconds_of(step, True))
    return dict(case=name, seconds=statistics.median(taken[4:]), tokens=tokens.numel())


def measured(case: str, steps: int, tune: bool) -> dict[str, Any]:
    """One case in this process, with its memory."""
    import torch

    found = measure_peft(steps) if case == "peft" else measure_ours(case, steps, tune)
    free, total = torch.cuda.mem_get_info()
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    found |= dict(peak_gib=peak / 2**30, reserved_gib=reserved / 2**30, device_gib=(total - free) / 2**30)
    return found | dict(tokens_per_s=found["tokens"] / found["seconds"])


def main() -> int:
    """Measure the cases, one process each, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["lora"], choices=[*CASES, "peft"])
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--peers", type=Path, help="folder with unpacked wheels of peft, accelerate and liger_kernel")
    parser.add_argument("--output", type=Path, help="also write the results here, as JSON")
    parser.add_argument(
        "--tune", action="store_true", help="let this trainer find the fastest GEMMs first, in 340 steps"
    )
    parser.add_argument("--here", action="store_true", help="one case in this very process")
    args = parser.parse_args()
    if args.peers:
        sys.path.insert(0, str(args.peers.resolve()))
    if args.here:
        print(json.dumps(measured(args.cases[0], args.steps, args.tune)))
        return 0
    results = []
    for case in args.cases:
        command = [
            sys.executable,
            __file__,
            case,
            "--here",
            "--steps",
            str(args.steps),
            *(["--tune"] if args.tune else []),
        ]
        done = subprocess.run(
            command + (["--peers", str(args.peers)] if args.peers else []), capture_output=True, text=True
        )
        line = done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else ""
        results.append(json.loads(line) if line else dict(case=case, failed=done.stderr.strip().splitlines()[-5:]))
        print(json.dumps(results[-1]), flush=True)
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
