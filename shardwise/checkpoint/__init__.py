"""Checkpoints: a run stopped at any instant, by anything, loses at most the steps since the last one.

A checkpoint is a folder `checkpoints/step-00000100` that appears in one step, complete:

1. `state` lists the shards that this rank writes, each element once over all ranks, and copies them;
2. `writer` writes the copy, with checksums, into a draft folder, while training goes on;
3. `commit` waits until every rank's file is there, verifies them, writes the manifest, and renames the draft;
4. `resume` finds the newest checkpoint that verifies and reads this rank's shards from it, whatever layout wrote it; a run
   without checkpoints can start from the weights of another run (`train.weights`).

`saver` runs 1 to 3 in parallel with training. `format` defines the files: safetensors, one for each rank, and a JSON manifest.
`reader` reads tensors, and boxes of them, from checkpoints and from folders of weights; `weights` loads a network; `huggingface`
converts. `folder` knows the names in a run folder and locks it, `job` decides whether a run may use it, and its `gather` lets
ranks agree.

PyTorch's own `torch.distributed.checkpoint` is not used. Its storage contains pickles. Its saving gathers plans over the process
group, from a background thread when asynchronous, where a rank that dies leaves the others waiting. And it needs DTensors, while
tensor and expert shards here are plain tensors with a table (`run/parameters.py`). Here ranks agree by the layout alone, and by
files.
"""
