"""What the fork server imports before it forks a rank. Only the fork server imports this module, since it also leaves the
command's session: a Ctrl-C or a SIGTERM to the command's process group must not end the server of ranks that are to save."""

import os

os.setsid()

import torch._dynamo  # noqa: E402  building a model imports it late
import torch.distributed.fsdp  # noqa: E402

import shardwise.cli.train  # noqa: E402
import shardwise.train.loop  # noqa: E402, F401
