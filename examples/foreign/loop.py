"""Plain PyTorch under its own profiler, without Shardwise: one step of a small language model on one GPU, twice.

`before` has small microbatches, reads each loss and updates parameter by parameter; `after` does none of that.
"""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True)
body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
model = nn.Sequential(nn.Embedding(8192, 1024), body, nn.Linear(1024, 8192)).cuda()
tokens = torch.randint(8192, (16, 513), device="cuda")


def record(name: str, microbatches: int, fused: bool) -> None:
    """Four warm-up steps and a recorded one."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=False)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    cycle = schedule(wait=0, warmup=4, active=1, repeat=1)
    with profile(activities=activities, schedule=cycle, record_shapes=True) as profiler:
        for _ in range(5):
            for part in tokens.chunk(microbatches):
                with torch.autocast("cuda", torch.bfloat16):
                    logits = model(part[:, :-1])
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
                loss.backward()
                if not fused:
                    print(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(name)


record("before.json.gz", microbatches=4, fused=False)
record("after.json.gz", microbatches=1, fused=True)
