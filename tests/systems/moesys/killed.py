"""A process that trains on a store until it is killed: run as a program, it makes one for each line that it reads.

It imports torch once and forks, so that a start takes milliseconds. A line is the store's folder; the answer is the
process's number, one `committed N` a step from the child, and `over` when it is dead.
"""

import os
import sys
from functools import partial
from pathlib import Path

from moebench.systems.moesys.policies import LRU
from moebench.systems.moesys.shards import ShardStore
from moebench.systems.moesys.storage import HierarchicalStorage
from tests.systems.moesys.stores import LAYOUT, changed_in, fill


def say(*words):
    """One line, at once."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def train(folder):
    """Steps without end: change three states through a cache of two, commit."""
    store = ShardStore.open(folder, LAYOUT)
    storage = HierarchicalStorage(store, LRU(2), slots=1)
    step = store.step
    while True:
        step += 1
        for key in changed_in(step, store.keys):
            storage.update(key, partial(fill, value=hash((step, key))))
        storage.commit(step)
        say("committed", step)


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if not child:
            train(Path(line.strip()))
        say(child)
        os.waitpid(child, 0)
        say("over")
