"""Saving a run and taking it up again, so that a crash at any instant costs at most the steps since the last checkpoint.

A checkpoint is a folder `checkpoints/step-00000100` that appears at once and whole:

1. `contents` lists what this rank holds that must be kept, as pieces of whole tensors, each piece once over all ranks;
2. `staging` copies it aside, and training goes on while `part` writes the copy, with checksums, into a draft folder;
3. `commit` waits until every rank's part is there, verifies them, writes the manifest, and renames the draft;
4. `resume` finds the newest checkpoint that verifies and reads of it what this rank needs, whatever layout wrote it;
5. `begin` reads, where there is none yet, the weights that the run is to begin with.

`saver` runs 1 to 3 beside the training, `folder` knows the names in a run folder, `lock` keeps others out of it. How the files
look is in `model/saved_files`, where generating and converting read them too.

PyTorch's own `torch.distributed.checkpoint` lends its planning of reads (`resume`). The rest of it is not used: its own
storage keeps pickles, its saving gathers plans over the process group, from a background thread when asynchronous, where a rank
that dies leaves the others waiting, and it wants DTensors where tensor and expert cuts are plain tensors with a table
(`parallel/split`). Here ranks agree by the layout alone, and by files.
"""

from shardwise.train.saves.begin import begin, check_weights
from shardwise.train.saves.resume import Resumed, check_folder, held, load, resume
from shardwise.train.saves.saver import Saver

__all__ = ["Resumed", "Saver", "begin", "check_folder", "check_weights", "held", "load", "resume"]
