"""What the fork server imports before it forks a rank. Only the fork server imports this module, since it also leaves the
command's session: a Ctrl-C or a SIGTERM to the command's process group must not end the server of ranks that are to save."""

# ruff: noqa: E402, F401
import atexit
import os

os.setsid()
atexit.register(os._exit, 0)  # at the end of the command, without tearing PyTorch down for seconds

import torch._dynamo  # otherwise imported when a model is built
import torch.distributed.fsdp

import shardwise.cli.main
import shardwise.cli.train
import shardwise.train.loop
