"""What the ranks of a session do in its tests, and their supervisors; apart, so that each start imports little."""

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from moebench.cluster.detect import launched
from moebench.cluster.session import Session, follow
from moebench.ranks.pulse import beat
from moebench.ranks.run import RanksError


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
