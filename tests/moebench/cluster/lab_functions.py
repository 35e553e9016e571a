"""What ranks run in the lab's tests; apart, so that a rank does not import pytest."""

import os
import signal
import time

import torch
import torch.distributed as dist

from moebench.cluster.lab import read_counters
from moebench.kernels.collectives import start_wait as sw
from moebench.kernels.collectives.group import process_group


def every_collective(group, seed):
    """Results of each collective on numbers that a sum in any order gives exactly."""
    source = torch.Generator().manual_seed(seed + group.rank)
    x = torch.randint(-99, 99, (2 * group.size, 3), generator=source).float()
    sent = [(group.rank + peer) % 3 for peer in range(group.size)]
    rows = torch.randint(-99, 99, (sum(sent), 3), generator=source).float()
    return [
        sw.all_to_all(x, group),
        sw.all_to_all(rows, group, sent, sent),  # as many come from a peer as go to it
        sw.all_gather(x, group),
        sw.reduce_scatter(x, group),
        sw.all_reduce(x, group),
    ]


def place(group):
    """The rank, and what it finds about its place."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    return [group.rank, *(int(os.environ[name]) for name in names)]


def traffic(group, network, payload_bytes, is_within_nodes):
    """Bytes and packets on every NIC while each rank sends `payload_bytes` in all, equal parts to each peer of a group;
    the group is the world, or the ranks of each node.
    """
    if is_within_nodes:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        groups = [dist.new_group(list(range(first, first + local))) for first in range(0, group.size, local)]
        exchanged = process_group(groups[group.rank // local], "node")
    else:
        exchanged = group
    x = torch.zeros(exchanged.size, payload_bytes // (exchanged.size - 1), dtype=torch.uint8)
    sw.all_to_all(x[:, :8], exchanged)  # connections are made
    dist.barrier()
    before = read_counters(network) if group.rank == 0 else ()
    dist.barrier()
    start = time.monotonic()
    sw.all_to_all(x, exchanged)
    end = time.monotonic()
    dist.barrier()
    after = read_counters(network) if group.rank == 0 else ()
    dist.barrier()
    return start, end, [now - then for now, then in zip(after, before)]


def exchanges_for_ever(group, payload_bytes):
    """Until it is stopped from outside."""
    x = torch.zeros(group.size, payload_bytes, dtype=torch.uint8)
    while True:
        sw.all_to_all(x, group)


def stops(group, rank):
    """One rank is stopped while the others wait for it."""
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def loses_connection(group):
    """One rank dies, the others say which address closed the connection."""
    dist.barrier()
    if group.rank == group.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError as error:
        time.sleep(0.1)  # so that the death is noticed first
        raise RuntimeError(f"lost a peer: {error}") from None


def tells_and_waits(group, folder):
    """Leaves its process id and stays."""
    with open(os.path.join(folder, f"{group.rank}.pid.part"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, os.path.join(folder, f"{group.rank}.pid"))
    time.sleep(1000)


def counted_by_each(_group, network):
    """What a rank itself reads."""
    return read_counters(network)
