"""What ranks run in the engine's tests, and on which cases; apart, so that a rank does not import pytest."""

import json
import os
import signal
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from moebench.cluster.detect import launched
from moebench.cluster.session import Session, follow
from moebench.cluster.worker import Request, measure
from moebench.plan import Filters, Machines, plan
from moebench.pulse import beat
from moebench.ranks import RanksError
from moebench.workloads.load import load_suite, load_topology


def this_machine(ranks):
    """A topology of some ranks of this machine."""
    described = load_topology("1x1-titan-rtx")
    hardware = replace(described.hardware, name="this-machine", kind="cpu")
    return replace(described, name=f"1x{ranks}-this-machine", gpus_per_node=ranks, hardware=hardware)


def some_cases(ranks, systems=(), **filters):
    """Cases of the smallest suite on some ranks of this machine."""
    here = this_machine(ranks)
    suite = load_suite("smoke")
    chosen = Filters(topologies=(here.name,), systems=systems, gates=("switch",), batch_sizes=(1,), **filters)
    return plan(suite, chosen, "cluster", Machines(load=lambda _: here))


def place(group, word):
    """Who this rank is, the sum of all ranks' numbers, and what it was told."""
    total = torch.tensor([group.rank])
    dist.all_reduce(total)
    return group.rank, group.size, int(total), word


def raise_on(group, rank):
    """One rank raises, the others wait for it."""
    if group.rank == rank:
        raise RuntimeError("out of ideas")
    dist.barrier()


def die_on(group, rank):
    """One rank is killed."""
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(group, rank):
    """One rank sleeps and the others wait for it."""
    if group.rank == rank:
        time.sleep(600)
    dist.barrier()


def hang_after_a_beat(group, rank, longest_s):
    """One rank hangs in something of which rank 0 has said how long it may take."""
    beat(longest_s, "tiny/case")
    hang_on(group, rank)


def measure_uneven(group, case, batch_sizes):
    """Measure a case of which every rank has a batch of its own size."""
    workload = replace(case.workload, batch_size=batch_sizes[group.rank])
    return measure(group, Request((replace(case, workload=workload),), 0, 1, 60.0, True))


def supervise():
    """One supervisor of a session: rank 0 has the jobs that standard input lists done, and prints how each ended."""
    found = launched()
    if found.rank:
        sys.exit(follow(found))
    session = Session(found)
    for name, args, *limits_s in json.load(sys.stdin):
        try:
            print(json.dumps(session.run(f"{__name__}:{name}", args, *limits_s)))
        except RanksError as error:
            print(json.dumps(str(error)))
    session.close()
