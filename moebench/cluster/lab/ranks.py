"""A lab: an emulated cluster for as long as a `with` block lasts, and ranks run on its nodes.

    with Lab(nodes=2, ranks_per_node=4, nic_rate_bits_per_s=1e9, switch_buffer_bytes=512 << 10) as lab:
        before = lab.counters()
        results = lab.run("module:function", args, timeout_s=60)
        traffic = [after - then for after, then in zip(lab.counters(), before)]
"""

import subprocess
from collections.abc import Sequence
from typing import Any, Self

from moebench.cluster.lab import holder, namespaces, silence
from moebench.cluster.lab.counters import NicCounters, read_counters
from moebench.cluster.lab.namespaces import MOST_NODES, NIC, Network, address
from moebench.cluster.lab.shaping import LEAST_BUFFER_BYTES, shape
from moebench.cluster.lab.tools import LabError
from moebench.rank_seat import Seat
from moebench.ranks import RanksError, run_ranks

_STORE_PORT = 29400  # in node 0's own namespace, where nothing else listens
_LEAST_RATE = 8000.0  # bit/s; `tc` takes no less than a byte a millisecond


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
        for name, value, least in (
            ("nodes", nodes, 1),
            ("ranks_per_node", ranks_per_node, 1),
            ("nic_rate_bits_per_s", nic_rate_bits_per_s, _LEAST_RATE),
            ("switch_buffer_bytes", switch_buffer_bytes, LEAST_BUFFER_BYTES),
        ):
            if not value >= least:
                raise ValueError(f"{name} = {value}: at least {least:g}")
        if nodes > MOST_NODES:
            raise ValueError(f"nodes = {nodes}: at most {MOST_NODES}")
        self.nodes, self.ranks_per_node = nodes, ranks_per_node
        self.nic_rate_bits_per_s, self.switch_buffer_bytes = nic_rate_bits_per_s, switch_buffer_bytes
        self._holder: subprocess.Popen[bytes] | None = None
        self._network: Network | None = None

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
        process, self._holder, self._network = self._holder, None, None
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

    def run(self, target: str, args: Sequence[Any] = (), timeout_s: float = 60.0) -> list[Any]:
        """Call `function(group, *args)` on every rank, as `moebench.ranks.run_ranks` does.

        Each rank finds its place in the variables that torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
        GROUP_RANK (its node) and GROUP_WORLD_SIZE.

        Raises:
            RanksError: a rank raised, died, or was not done in time; says who did not answer whom.
        """
        seats = [self._seat(rank) for rank in range(self.world)]
        try:
            return run_ranks(target, self.world, args, timeout_s, seats, self._diagnose)
        except RanksError as error:
            raise RanksError(silence.with_ranks(str(error), self.nodes, self.ranks_per_node)) from error.__cause__

    def counters(self) -> tuple[NicCounters, ...]:
        """Each node's NIC counters since the lab was built."""
        return read_counters(self.network)

    def set_nic(self, node: int, is_up: bool) -> None:
        """Pull a node's cable, or plug it in again."""
        change = namespaces.bring_up if is_up else namespaces.take_down
        change(self.network, node)

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

    def _diagnose(self) -> list[str]:
        try:
            return silence.silent_nodes(self.network, self.ranks_per_node)
        except LabError as error:
            return [f"the lab itself could not be asked who did not answer: {error}"]
