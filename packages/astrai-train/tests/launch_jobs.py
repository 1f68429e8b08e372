"""What the ranks of test_train_launch.py do, each in a process of its own."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from pathlib import Path

import torch
from torch import distributed

from astrai_core.errors import DataError


def ranks(rank_file: Path) -> tuple[int, int]:
    """Leave a file that says whether a group was open at the end, and return (ranks, sum of what they told each other)."""
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    atexit.register(lambda: rank_file.with_name(f"rank_{rank}").write_text(f"open: {distributed.is_initialized()}"))
    total = torch.tensor(rank + 1)
    distributed.all_reduce(total)
    return size, int(total)


def fail(rank: int, how: str) -> None:
    """Fail on one rank, while the others wait for it in a collective, or on all."""
    if how == "in nccl":
        torch.cuda.set_device(distributed.get_node_local_rank())
    distributed.init_process_group("nccl" if how == "in nccl" else "gloo")
    if how == "in nccl":  # there is a communicator before one of them is gone
        distributed.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
    if how == "all":
        raise DataError("there is no data anywhere")
    if distributed.get_rank() == rank:
        if how == "lingers":  # what a thread, or a GPU, still waits for keeps the process from ending
            threading.Thread(target=time.sleep, args=(100,)).start()
            raise DataError("rows.jsonl:3: not JSON; mend the line")
        if how == "unforeseen":
            raise ZeroDivisionError("by nothing")
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(600)
    distributed.barrier()
    if how == "in nccl":
        torch.cuda.synchronize()


def linger(directory: Path) -> None:
    """Say which process this is, and do not end."""
    path = directory / os.environ["RANK"]
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").rename(path)
    time.sleep(600)
