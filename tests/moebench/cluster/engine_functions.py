"""What ranks run in the engine's tests, and on which cases; apart, so that a rank does not import pytest."""

from dataclasses import replace

from moebench.cases.plan import Filters, Machines, plan
from moebench.cluster import worker
from moebench.cluster.worker import Request, measure
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


def measure_briefly(group, request):
    """What the engine has its ranks do, with samples of a few steps: for tests that look at something else."""
    worker.SAMPLE_S = 0.0
    return measure(group, request)


BRIEFLY = f"{__name__}:{measure_briefly.__name__}"


def measure_uneven(group, case, batch_sizes):
    """Measure a case of which every rank has a batch of its own size."""
    workload = replace(case.workload, batch_size=batch_sizes[group.rank])
    return measure_briefly(group, Request((replace(case, workload=workload),), 0, 1, 60.0, True))
