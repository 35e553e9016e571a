"""A lab: an emulated cluster for as long as a `with` block lasts, and ranks run on its nodes.

    with Lab(nodes=2, ranks_per_node=4, nic_rate_bits_per_s=1e9, switch_buffer_bytes=512 << 10) as lab:
        before = lab.counters()
        results = lab.run("module:function", args, timeout_s=60)
        traffic = [after - then for after, then in zip(lab.counters(), before)]
"""

import signal
import subprocess
from collections.abc import Sequence
from typing import Any, Self

from moebench.cluster.lab import holder, namespaces, silence
from moebench.cluster.lab.counters import NicCounters, read_counters
from moebench.cluster.lab.limits import buffer_problem, rate_problem
from moebench.cluster.lab.namespaces import MOST_NODES, NIC, Network, address
from moebench.cluster.lab.shaping import shape
from moebench.cluster.lab.tools import LabError
from moebench.ranks.run import PlaceLost, RanksError, run_ranks
from moebench.ranks.seat import Seat

_STORE_PORT = 29400  # in node 0's own namespace, where nothing else listens


class Lab:
    """Nodes as network namespaces of this machine, each with one NIC of a given rate into one switch.

    Entering it removes what dead owners have left, leaving it removes all of it; if this process dies, the kernel does.

    Attributes:
        nodes, ranks_per_node: its size; rank r is on node r // ranks_per_node.
        nic_rate_bits_per_s: rate of every NIC, each way.
        switch_buffer_bytes: buffer of each port of the switch.
    """

    def __init__(
        self,
        nodes: int,
        ranks_per_node: int,
        nic_rate_bits_per_s: float,
        switch_buffer_bytes: int = 512 << 10,
    ) -> None:
        if not (1 <= nodes <= MOST_NODES and ranks_per_node >= 1):
            raise ValueError(f"{nodes} nodes of {ranks_per_node} ranks: at least one each, at most {MOST_NODES} nodes")
        for name, value, problem in (
            ("nic_rate_bits_per_s", nic_rate_bits_per_s, rate_problem(nic_rate_bits_per_s)),
            ("switch_buffer_bytes", switch_buffer_bytes, buffer_problem(switch_buffer_bytes)),
        ):
            if problem:
                raise ValueError(f"{name} = {value}: {problem}")
        self.nodes, self.ranks_per_node = nodes, ranks_per_node
        self.nic_rate_bits_per_s, self.switch_buffer_bytes = nic_rate_bits_per_s, switch_buffer_bytes
        self._holder: subprocess.Popen[bytes] | None = None
        self._network: Network | None = None
        self._is_cut = False

    def __enter__(self) -> Self:
        """Build it.

        Raises:
            LabError: this machine refused; `lab_problem` says what to do.
        """
        if self._holder is not None:
            raise LabError("this lab is already built")
        holder.remove_stale()
        self._holder = holder.start_holder()
        try:
            self._network = Network(self._holder.pid, self.nodes)
            namespaces.wire(self._network)
            shape(self._network, self.nic_rate_bits_per_s, self.switch_buffer_bytes)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove it; a second call does nothing."""
        process, self._holder, self._network, self._is_cut = self._holder, None, None, False
        if process is not None:
            holder.end_holder(process)

    @property
    def network(self) -> Network:
        """The lab's namespaces; pass it to ranks that read counters around what they time.

        Raises:
            LabError: the lab is not built, or closed.
        """
        if self._network is None:
            raise LabError("this lab is not built: use it in a `with` block")
        return self._network

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """The node that a rank is on."""
        return rank // self.ranks_per_node

    def ranks_at(self, node_address: str) -> range:
        """The ranks behind a NIC's address; empty if it is no node's."""
        for node in range(self.nodes):
            if address(node) == node_address:
                return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)
        return range(0)

    def restore(self) -> None:
        """Build it anew if something from outside has ended its holder, and with it the network, or cut a node off.

        Raises:
            LabError: as on entering.
        """
        if self._holder is not None and (self._is_cut or self._loss() is not None):
            self.close()
            self.__enter__()

    def run(
        self, target: str, args: Sequence[Any] = (), timeout_s: float = 60.0, silence_s: float | None = None
    ) -> list[Any]:
        """Call `function(group, *args)` on every rank, as `moebench.ranks.run.run_ranks` does.

        Each rank finds its place in the variables that torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
        GROUP_RANK (its node) and GROUP_WORLD_SIZE.

        Raises:
            RanksError: a rank raised, died, or was not done in time; says who did not answer whom.
            PlaceLost: the lab's holder was ended, or a node is cut off; `restore` builds the lab anew.
            LabError: the holder had been ended before.
        """
        seats = [self._seat(rank) for rank in range(self.world)]
        try:
            return run_ranks(
                target, self.world, args, timeout_s, seats, self._diagnose, silence_s=silence_s, lost=self._loss
            )
        except PlaceLost:
            raise
        except RanksError as error:
            kind = PlaceLost if self._is_cut else RanksError
            raise kind(silence.with_ranks(str(error), self.nodes, self.ranks_per_node)) from error.__cause__

    def counters(self) -> tuple[NicCounters, ...]:
        """Each node's NIC counters since the lab was built."""
        return read_counters(self.network)

    def set_nic(self, node: int, is_up: bool) -> None:
        """Pull a node's cable, or plug it in again."""
        change = namespaces.bring_up if is_up else namespaces.take_down
        change(self.network, node)
        self._is_cut = False  # what its owner does to a lab is no accident, until ranks fail by it

    def _seat(self, rank: int) -> Seat:
        node, network = self.node_of(rank), self.network
        user = network.user_namespace()
        variables = {
            "LOCAL_RANK": rank % self.ranks_per_node,
            "LOCAL_WORLD_SIZE": self.ranks_per_node,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": self.nodes,
        }
        return Seat(
            ((user,) if user else ()) + (network.namespace(node),),
            NIC,
            (address(0), _STORE_PORT),
            {name: str(value) for name, value in variables.items()},
        )

    def _loss(self) -> str | None:
        """What happened to the holder, if it has ended."""
        status = None if self._holder is None else self._holder.poll()
        if self._holder is None or status is None:
            return None
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"the emulated cluster is gone: the process that held it ({self._holder.pid}) {how}"

    def _diagnose(self) -> list[str]:
        try:
            self._is_cut = bool(silence.cut_nodes(self.network))
            return silence.silent_nodes(self.network, self.ranks_per_node)
        except LabError as error:
            return [f"the lab itself could not be asked who did not answer: {error}"]
