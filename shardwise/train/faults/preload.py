"""The imports of the fork server, before it forks a rank. Only the fork server imports this module, since it also leaves the
command's session: a Ctrl-C or a SIGTERM to the command's process group must not end the server of ranks that still have to save.
Its output is discarded: what it prints if the command ends while a rank starts is useless, and ranks have their own output."""

# ruff: noqa: E402, F401
import atexit
import os
import signal

from shardwise.train.faults.stop import SIGNALS

os.setsid()
for number in SIGNALS:  # signals that came for the command's group meanwhile are discarded
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
for number in SIGNALS:
    signal.signal(number, signal.SIG_DFL)
for stream in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
atexit.register(os._exit, 0)  # when the command ends, skip PyTorch's teardown, which takes seconds

import torch._dynamo  # otherwise imported when a model is built
import torch.distributed.fsdp

import shardwise.train.loop
import shardwise.train.processes.launch
