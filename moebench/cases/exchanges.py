"""Planning an experiment of exchanges: payloads x topologies x exchanges.

What is left open is the node type, and for a claim that names none the payload; but every payload runs anyway, as it is
what the exchanges differ by. Topologies that the experiment lists besides its grid are no assumption: they always run.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import product

from moebench.cases.case import Case
from moebench.cases.plan import Context, Place, wanted
from moebench.workloads.exchange import EXCHANGES, ExchangeWorkload, size_words
from moebench.workloads.machine import Topology
from moebench.workloads.suite import ExchangeExperiment

ONE_RANK = "1x1"
CPU_PAYLOAD_BYTES = 16 * 2**20  # ranks of this machine share its cores and memory; more bytes say nothing new


def names(experiment: ExchangeExperiment, source: str) -> Mapping[str, Sequence[object]]:
    """What filters may name of an experiment."""
    return {"dtype": experiment.dtypes, "system": list(EXCHANGES)}


def cases(experiment: ExchangeExperiment, context: Context) -> Iterator[Case]:
    """The cases of an experiment, topology by topology; none where a filter asks for a gate or a batch size, or for the
    engine of one process.
    """
    filters = context.filters
    if filters.gates or filters.batch_sizes or context.engine == "local":
        return
    exchanges = [name for name in filters.systems or experiment.exchanges if name in EXCHANGES]
    dtypes = [dtype for dtype in experiment.dtypes if wanted(filters.dtypes, dtype)]
    for place in context.places(experiment):
        if place.size == ONE_RANK or not _is_planned(experiment, place, filters.quick):
            continue
        for payload, dtype, name in product(experiment.payloads_bytes, dtypes, dict.fromkeys(exchanges)):
            yield context.case(
                experiment, place, name, ExchangeWorkload(payload, dtype),
                implementation=name, assumptions={"gpu": place.gpu}, is_default=is_default(experiment, place.topology),
            )  # fmt: skip


def is_default(experiment: ExchangeExperiment, topology: str) -> bool:
    """Whether a topology is of the first node type, or one that is no assumption."""
    return topology in experiment.also or topology.partition("-")[2] == experiment.node_types[0]


def _is_planned(experiment: ExchangeExperiment, place: Place, quick: bool) -> bool:
    return not quick or place.asked or is_default(experiment, place.topology)


def check_key(case: Case) -> tuple[Hashable, ...]:
    """Cases of one key are right or wrong together: the check tries the exchange, not the size."""
    return case.system, case.workload.dtype


def refusal(case: Case, topology: Topology) -> tuple[str, str] | None:
    """Why real ranks don't run a case: it has no meaning, or is too large for ranks on CPUs."""
    exchange = exchange_of(case)
    reason = exchange.problem(topology.ranks)
    if reason is not None:
        return "unsupported", reason
    if topology.hardware.kind == "cpu" and exchange.payload_bytes > CPU_PAYLOAD_BYTES:
        limit = size_words(CPU_PAYLOAD_BYTES)
        return "skipped", f"a payload of {size_words(exchange.payload_bytes)} a rank; on CPUs the limit is {limit}"
    return None


def exchange_of(case: Case) -> ExchangeWorkload:
    """The exchange of a case that is about one."""
    if not isinstance(case.workload, ExchangeWorkload):
        raise TypeError(f"{case.name} is about a {case.workload.kind}, not an exchange")
    return case.workload
