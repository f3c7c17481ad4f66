"""Writes a profile of any size, as Kineto writes one: operators that nest, launches, kernels on several streams that run behind
them, NCCL's kernels with their arguments, copies, arrows, in profiler steps. Seeded, so that everyone times the same file.

    python benchmarks/trace_made.py FILE.json.gz [--events 1000000] [--rank 0] [--world 1]
"""

from __future__ import annotations

import argparse
import gzip
import random
from collections.abc import Iterator
from pathlib import Path

PROCESS, BACKWARD_THREAD = 4100, 4388
STREAMS = (7, 20, 24)
OPERATORS = ("aten::linear", "aten::addmm", "aten::mul", "aten::add_", "aten::native_layer_norm", "aten::copy_", "aten::_softmax",
             "aten::scaled_dot_product_attention", "aten::cat", "aten::empty_strided", "aten::transpose", "aten::view",
             "autograd::engine::evaluate_function: AddmmBackward0", "AddmmBackward0", "aten::_foreach_add_")  # fmt: skip
FUNCTORS = (
    "AddFunctor",
    "MulFunctor",
    "GeluFunctor",
    "CopyFunctor",
    "FillFunctor",
    "SqrtFunctor",
    "DivFunctor",
    "NegFunctor",
)
COLLECTIVES = (("allreduce", "AllReduce_Sum_bf16_RING_LL"), ("_allgather_base", "AllGather_RING_LL"),
               ("_reduce_scatter_base", "ReduceScatter_Sum_f32_RING_LL"))  # fmt: skip
SHAPES = ((4096, 4096), (8, 2048, 4096), (16384, 4096), (8, 32, 2048, 128), (11008, 4096), (4096,), (32000, 4096))


def kernel_names() -> list[str]:
    """As long and as many as those of a real program."""
    names = [f"ampere_bf16_s16816gemm_bf16_{m}x{n}_ldg8_f2f_stages_64x{s}_{t}" for m in (64, 128, 256) for n in (64, 128)
             for s in (3, 4, 5) for t in ("nn", "nt", "tn")]  # fmt: skip
    for functor in FUNCTORS:
        for width in (2, 4, 8):
            inner = f"at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, at::native::binary_internal::{functor}<float> >"
            names.append(
                f"void at::native::vectorized_elementwise_kernel<{width}, {inner}, at::detail::Array<char*, 3> >"
                f"(int, {inner}, at::detail::Array<char*, 3>)"
            )
    return names


def span(
    category: str, name: str, process: int, thread: int, start: int, duration: int, arguments: str, phase: str = "X"
) -> str:
    """One event as Kineto lays it out; times in nanoseconds."""
    return (
        f'  {{\n    "ph": "{phase}", "cat": "{category}", "name": "{name}", "pid": {process}, "tid": {thread},\n'
        f'    "ts": {start // 1000}.{start % 1000:03d}, "dur": {duration // 1000}.{duration % 1000:03d},\n'
        f'    "args": {{\n      {arguments}\n    }}\n  }}'
    )


def arrow(phase: str, number: int, process: int, thread: int, start: int) -> str:
    """A launch's arrow to what it launched."""
    end = ', "bp": "e"' if phase == "f" else ""
    return (
        f'  {{\n    "ph": "{phase}", "id": {number}, "pid": {process}, "tid": {thread}, '
        f'"ts": {start // 1000}.{start % 1000:03d},\n    "cat": "ac2g", "name": "ac2g"{end}\n  }}'
    )


def events(count: int, rank: int, world: int) -> Iterator[str]:
    """The events in turn: operators with their launches, kernels as they become ready; eight profiler steps."""
    chance = random.Random(f"{count} {rank} {world}")
    kernels = kernel_names()
    groups = f'"Process Group Name": "0", "Process Group Description": "default_pg", "Process Group Ranks": "{list(range(world))}"'
    now = 1_212_075_548_353_304_123 % 10**15  # after the base time, as newer PyTorch writes it
    free = dict.fromkeys(STREAMS, now)
    number, made, begun, step, external = 1000, 0, now, 0, 1
    per_step = count // 8
    while made < count - 20:
        external += 1
        thread = PROCESS if external % 3 else BACKWARD_THREAD
        name = chance.choice(OPERATORS)
        shapes = [list(chance.choice(SHAPES)) for _ in range(2)]
        launch = now + chance.randint(2000, 6000)
        took = chance.randint(3000, 9000)
        outer = took + chance.randint(8000, 20000)
        inputs = (
            f'"External id": {external}, "Record function id": 0, "Sequence number": {external}, "Fwd thread id": '
            f'{int(thread != PROCESS)}, "Concrete Inputs": ["", "", "1"], "Input type": ["c10::BFloat16", "c10::BFloat16", '
            f'"Scalar"], "Input Dims": [{shapes[0]}, {shapes[1]}, []], "Ev Idx": {external}'
        )
        yield span("cpu_op", name, PROCESS, thread, now, outer, inputs)
        yield span("cpu_op", "aten::empty", PROCESS, thread, now + 500, 1200, inputs)
        number += 1
        message = external % 40 == 0
        copy = external % 25 == 0
        stream = STREAMS[1] if message else STREAMS[2] if copy else STREAMS[0]
        call = "cudaMemcpyAsync" if copy else "cudaLaunchKernel"
        yield span("cuda_runtime", call, PROCESS, thread, launch, took,
                   f'"External id": {external}, "cbid": 211, "correlation": {number}')  # fmt: skip
        yield arrow("s", number, PROCESS, thread, launch)
        start = max(launch + chance.randint(2000, 5000), free[stream])
        length = chance.randint(200_000, 900_000) if message else int(chance.lognormvariate(9.4, 1.0))
        free[stream] = start + length
        device = (
            f'"External id": {external}, "queued": 0, "device": {rank % 8}, "context": 1, '
            f'"stream": {stream}, "correlation": {number}'
        )
        if copy:
            yield span("gpu_memcpy", "Memcpy DtoD (Device -> Device)", rank % 8, stream, start, length,
                       f'{device}, "bytes": {length * 100}, "memory bandwidth (GB/s)": 812.2150101419878')  # fmt: skip
        else:
            shape = (
                f'{device}, "registers per thread": 96, "shared memory": 87568, "blocks per SM": 0.074074, '
                f'"warps per SM": 1.259259, "grid": [8, 1, 1], "block": [544, 1, 1], "est. achieved occupancy %": 12'
            )
            if message:
                collective, kernel = chance.choice(COLLECTIVES)
                elements = chance.choice((4096, 1 << 20, 1 << 24))
                shape += (
                    f', "Collective name": "{collective}", "In msg nelems": {elements}, "Out msg nelems": {elements}, '
                    f'"Group size": {world}, "dtype": "BFloat16", "In split size": "[]", "Out split size": "[]", {groups}'
                )
                yield span("kernel", f"ncclDevKernel_{kernel}(ncclDevComm*, unsigned long, ncclWork*)", rank % 8, stream, start,
                           length, shape)  # fmt: skip
            else:
                yield span("kernel", chance.choice(kernels), rank % 8, stream, start, length, shape)
        yield arrow("f", number, rank % 8, stream, start)
        made += 6
        now += outer + chance.randint(1000, 9000)
        if made >= (step + 1) * per_step - 20:
            now = max(now, *free.values()) + 20_000
            yield span("user_annotation", f"ProfilerStep#{step + 3}", PROCESS, PROCESS, begun, now - begun,
                       f'"External id": {external}, "Record function id": 0, "Ev Idx": {external}')  # fmt: skip
            made, step, begun = made + 1, step + 1, now + 700
            now = begun
    for lane in (*STREAMS, PROCESS, BACKWARD_THREAD):
        process = PROCESS if lane >= PROCESS else rank % 8
        yield (f'  {{\n    "name": "thread_name", "ph": "M", "ts": 0.000, "pid": {process}, "tid": {lane},\n'
               f'    "args": {{\n      "name": "{"thread" if lane >= PROCESS else "stream"} {lane}"\n    }}\n  }}')  # fmt: skip


def write(path: Path, count: int, rank: int = 0, world: int = 1) -> None:
    """Write a profile of about `count` events."""
    members = list(range(world))
    with gzip.open(path, "wt", compresslevel=6, encoding="utf-8") as file:
        file.write(
            '{\n  "schemaVersion": 1,\n  "deviceProperties": [\n    {\n      "id": '
            f'{rank % 8}, "name": "NVIDIA H100", "totalGlobalMem": 84990623744, "numSms": 132\n    }}\n  ],\n'
            f'  "distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": {world}, "pg_count": 1, "pg_config": '
            f'[{{"pg_name": "0", "pg_desc": "default_pg", "pg_size": {world}, "ranks": {members}}}]}},\n'
            '  "record_shapes": 1,\n  "displayTimeUnit": "ms",\n  "baseTimeNanoseconds": 1751410836000000000,\n'
            '  "traceEvents": [\n'
        )
        separator = ""
        for event in events(count, rank, world):
            file.write(separator + event)
            separator = ",\n"
        file.write('\n  ],\n  "traceName": "made.json"\n}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    args = parser.parse_args()
    write(args.file, args.events, args.rank, args.world)


if __name__ == "__main__":
    main()
