"""Processes that an engine works in: they have imported torch, compute on one thread, and end with the run."""

import gc
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver, get_context

from moebench.garbage import look_seldom

_PRELOADED = ["torch", "moebench.sim.engine", "moebench.trace.layer"]


@contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A `worker_pool` for the block; where the block ends early, what runs in it is ended too, minutes of it maybe."""
    pool = worker_pool(jobs)
    try:
        yield pool
    except BaseException:  # also when who takes the rows stops: GeneratorExit
        end(pool)
        raise
    pool.shutdown()


def get_ready() -> None:
    """Start the process that workers are copied from: its imports take seconds, in which there is other work."""
    get_context("forkserver").set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()


@contextmanager
def ahead() -> Iterator[None]:
    """`get_ready` before the block, which reads what is to be simulated; where it raises, nothing is left running."""
    get_ready()
    try:
        yield
    except BaseException:
        server = forkserver._forkserver
        os.kill(server._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
        server._stop()  # type: ignore[attr-defined]
        raise


def worker_pool(jobs: int) -> ProcessPoolExecutor:
    """The processes; to be shut down, or ended."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin)


def end(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool now; files they write whole or not at all."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


def _begin() -> None:
    """Workers share the cores, one thread each, and end with the process that they work for."""
    import torch

    from moebench.stopping import end_with_parent

    end_with_parent()
    torch.set_num_threads(1)
    gc.freeze()
    look_seldom()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
