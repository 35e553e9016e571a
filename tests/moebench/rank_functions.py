"""What ranks run in test_ranks.py; apart, so that a rank does not import pytest."""

import os
import signal
import time

import torch
import torch.distributed as dist

from moebench.ranks.pulse import beat


def sums(group, value):
    total = torch.full((3,), float(group.rank + value))
    dist.all_reduce(total)
    return group.rank, group.size, total


def environment(_group, name):
    return os.getpid(), os.getcwd(), os.environ.get(name), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def raises(group, rank):
    if group.rank == rank:
        raise ValueError(f"the {rank}th went wrong")
    dist.barrier()


def dies(group, rank, how):
    print("last words", flush=True)
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else os._exit(7)
    dist.barrier()


def hangs(group, rank):
    if group.rank == rank:
        time.sleep(1000)
    return os.getpid()


def tells_and_hangs(group, folder):
    with open(f"{folder}/{group.rank}.pid", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(1000)


def hangs_after_a_beat(group, rank, longest_s):
    beat(longest_s, "tiny/case")
    if group.rank == rank:
        time.sleep(1000)
    dist.barrier()


def is_slow_and_says_so(group, seconds):
    for _ in range(10):
        beat(3 * seconds)
        time.sleep(seconds)
    return group.rank


def has_child(_group, path):
    if (child := os.fork()) == 0:
        time.sleep(1000)
    with open(path, "w") as file:
        file.write(str(child))
    time.sleep(1000)


def unpicklable(group):
    return (lambda: 1) if group.rank == 1 else 1


def computes_on_many_threads_first(_group):
    return (torch.ones(64, 64) @ torch.ones(64, 64)).sum().item()
