"""Who starts the ranks of a topology: this process on loopback, on an emulated cluster, or a launcher that already has.

All run a function on every rank and bring back what it returns; a topology's name says which one is meant.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from moebench.cluster.room import room_problem
from moebench.ranks.run import run_ranks
from moebench.workloads.errors import InputError
from moebench.workloads.machine import Topology
from moebench.workloads.places import EMULATED, ON_THIS_MACHINE

if TYPE_CHECKING:
    from moebench.cluster.lab import Lab, NicCounters
    from moebench.cluster.session import Session

Counters = Callable[[], "Sequence[NicCounters]"]


class Launcher(Protocol):
    """Runs functions on ranks."""

    @property
    def counters(self) -> Counters | None:
        """Reads the NICs of all nodes, from within a rank too; None where nobody counts."""

    def run(
        self, target: str, args: Sequence[Any] = (), timeout_s: float = 60.0, silence_s: float | None = None
    ) -> list[Any]:
        """Call `function(group, *args)` of `module:function` on every rank; results in rank order.

        Args:
            silence_s: from rank 0's start of the function to its first sign of life (`ranks.pulse`), which says how
                long it may take to the next; None: it gives none.

        Raises:
            RanksError: a rank raised, died, or was not done in time.
            PlaceLost: what the ranks stood on is gone; a further call builds it anew.
        """


@dataclass(frozen=True)
class Loopback:
    """Ranks forked on this machine that talk over loopback; they pretend to sit on nodes, by default all on one."""

    ranks: int
    ranks_per_node: int | None = None
    counters: Counters | None = None

    def run(
        self, target: str, args: Sequence[Any] = (), timeout_s: float = 60.0, silence_s: float | None = None
    ) -> list[Any]:
        """As `Launcher.run`."""
        return run_ranks(
            target, self.ranks, args, timeout_s, ranks_per_node=self.ranks_per_node, silence_s=silence_s
        )


@contextmanager
def launcher_of(topology: Topology, session: "Session | None") -> Iterator[Launcher]:
    """The launcher of a topology's ranks, for as long as the block lasts.

    Args:
        session: this process and its peers, where a launcher started them.

    Raises:
        LabError: the emulated cluster could not be built.
    """
    if session is not None:
        yield session
    elif topology.node_type == EMULATED:
        rate, buffer = topology.link_parameters["nic.bandwidth"], topology.link_parameters["switch.buffer"]
        with in_lab(topology.nodes, topology.gpus_per_node, 8 * rate.value, int(buffer.value)) as launcher:
            yield launcher
    else:
        yield Loopback(topology.ranks, topology.gpus_per_node)


@contextmanager
def in_lab(nodes: int, ranks_per_node: int, nic_rate_bits_per_s: float, switch_buffer_bytes: int) -> Iterator[Launcher]:
    """The launcher of an emulated cluster, for as long as the block lasts.

    Raises:
        LabError: it could not be built.
    """
    from moebench.cluster.lab import Lab

    with Lab(nodes, ranks_per_node, nic_rate_bits_per_s, switch_buffer_bytes) as lab:
        yield _InLab(lab)


@dataclass(frozen=True)
class _InLab:
    """Ranks on an emulated cluster."""

    lab: "Lab"

    @property
    def counters(self) -> Counters | None:
        """Of the lab as it stands, which is built anew where it was lost."""
        from moebench.cluster.lab import read_counters

        self.lab.restore()
        return partial(read_counters, self.lab.network)

    def run(
        self, target: str, args: Sequence[Any] = (), timeout_s: float = 60.0, silence_s: float | None = None
    ) -> list[Any]:
        """As `Launcher.run`."""
        self.lab.restore()
        return self.lab.run(target, args, timeout_s, silence_s)


def check_startable(topologies: Sequence[Topology], session: "Session | None") -> None:
    """Refuse, before anything is written, what can't be run.

    Raises:
        InputError: a topology does not describe the ranks there are, or this machine can't emulate it; says what to do.
    """
    if session is not None:
        for topology in topologies:
            session.check(topology)
        return
    for topology in topologies:
        if topology.node_type not in ON_THIS_MACHINE:
            raise InputError(
                f"engine cluster runs real ranks, and topology {topology.name} is not of this machine: start them "
                f"there (moebench launch --suite SUITE --topology {topology.name} prints how), or emulate a cluster "
                f"here with --emulate {topology.nodes}x{topology.gpus_per_node}"
            )
        if problem := room_problem(topology.ranks):
            raise InputError(f"topology {topology.name}: {problem}")
    emulated = [topology for topology in topologies if topology.node_type == EMULATED]
    if emulated:
        from moebench.cluster.lab import lab_problem
        from moebench.cluster.lab.limits import buffer_problem, rate_problem

        for topology in emulated:
            rate, buffer = topology.link_parameters["nic.bandwidth"], topology.link_parameters["switch.buffer"]
            problem = rate_problem(8 * rate.value) or buffer_problem(buffer.value)
            if problem:
                raise InputError(f"topology {topology.name}: {problem}")
        problem = lab_problem()
        if problem:
            raise InputError(problem)
