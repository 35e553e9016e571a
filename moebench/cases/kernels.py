"""Planning an experiment of kernels: operator x shape x implementation, on one device of each node type.

The device is what is swept: nothing else is left open, and the suite's first node type is the default.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import product

from moebench.cases.case import Case
from moebench.cases.plan import Context, Filters, wanted
from moebench.workloads.kernel import KernelWorkload, combined
from moebench.workloads.machine import Topology
from moebench.workloads.suite import KernelExperiment, KernelGrid

ONE_DEVICE = "1x1"


def names(experiment: KernelExperiment, source: str) -> Mapping[str, Sequence[object]]:
    """What filters may name of an experiment."""
    from moebench.workloads.kernel_calls import implementations_of

    return {
        "dtype": [dtype for grid in experiment.kernels for dtype in grid.dtypes],
        "system": list(dict.fromkeys(name for grid in experiment.kernels for name in implementations_of(grid.op))),
    }


def cases(experiment: KernelExperiment, context: Context) -> Iterator[Case]:
    """The cases of an experiment, device by device; none where a filter asks for a gate or a batch size, or the engine
    is one of ranks.
    """
    filters = context.filters
    if filters.gates or filters.batch_sizes or context.engine == "cluster":
        return
    default = experiment.node_types[0]
    for place in context.places(experiment):
        if place.size != ONE_DEVICE or (filters.quick and not place.asked and place.gpu != default):
            continue
        for grid in experiment.kernels:
            implementations = _implementations(grid, filters)
            for workload, name in product(workloads_of(grid, context.suite.seed, filters.dtypes), implementations):
                yield context.case(
                    experiment, place, name, workload,
                    implementation=name, assumptions={"gpu": place.gpu}, is_default=place.gpu == default,
                )  # fmt: skip


def check_key(case: Case) -> tuple[Hashable, ...]:
    """Cases of one key are right or wrong together: what an implementation may treat apart from other calls of it.

    Tokens and widths are not among it: the check has odd ones.
    """
    kernel = kernel_of(case)
    # On a device of this machine the check runs there, in the case's own dtype.
    place = "here" if case.engine == "local" else "described"
    return case.implementation, kernel.op, kernel.variant, kernel.dtype, kernel.top_k, kernel.direction, place


def refusal(case: Case, topology: Topology) -> tuple[str, str] | None:
    """Why several real ranks don't run a case."""
    reason = kernel_of(case).problem(topology.ranks)
    return None if reason is None else ("unsupported", reason)


def kernel_of(case: Case) -> KernelWorkload:
    """The kernel of a case that is about one."""
    if not isinstance(case.workload, KernelWorkload):
        raise TypeError(f"{case.name} is about a {case.workload.kind}, not a kernel")
    return case.workload


def workloads_of(grid: KernelGrid, seed: int, dtypes: Sequence[str] = ()) -> list[KernelWorkload]:
    """Every combination of a grid, in one of `dtypes` where any are given; the direction fastest."""
    chosen = [dtype for dtype in grid.dtypes if wanted(dtypes, dtype)]
    return [
        KernelWorkload(grid.op, **sizes, variant=variant, dtype=dtype, direction=direction, seed=seed)
        for sizes, variant, dtype, direction in product(combined(grid.shapes), grid.variants, chosen, grid.directions)
    ]


def _implementations(grid: KernelGrid, filters: Filters) -> list[str]:
    """The grid's own, or those of the filter's names that are implementations of its operator."""
    if not filters.systems:
        return list(grid.implementations)
    from moebench.workloads.kernel_calls import implementations_of

    known = implementations_of(grid.op)
    return [name for name in dict.fromkeys(filters.systems) if name in known]
