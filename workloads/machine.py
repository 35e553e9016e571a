"""Hardware and topology as data: every number a Parameter with unit, status, source and range.

The cost model reads a flat mapping from parameter name to value; `Topology.parameters()` makes it. The loaders
(moebench.workloads.load) turn TOML into these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

STATUSES = ("datasheet", "measured", "derived", "assumed")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number of a machine, in SI base units (bytes, bytes/s, FLOP/s, seconds) or dimensionless.

    Attributes:
        value, low, high: nominal value and range; equal for a datasheet number.
        unit: the unit in which the file states it, for display.
        scale: multiply a displayed number by this to get `value`.
        status: one of `STATUSES`.
        source: where it comes from.
    """

    value: float
    low: float
    high: float
    unit: str
    scale: float
    status: str
    source: str

    @property
    def is_uncertain(self) -> bool:
        """Whether the range is wider than a point."""
        return self.high > self.low


@dataclass(frozen=True, slots=True)
class Curve:
    """Share of a peak rate reached against the size of the work; log-linear between points, flat outside."""

    at: tuple[float, ...]
    share: tuple[float, ...]
    status: str
    source: str


@dataclass(frozen=True)
class Hardware:
    """One GPU or CPU.

    Attributes:
        parameters: named `gpu.memory.capacity`, `gpu.memory.bandwidth`, `gpu.peak.<dtype>`,
            `gpu.product.compute_share`, `gpu.product.bandwidth_share`, `gpu.product.fixed`, `gpu.kernel.fixed`,
            `gpu.product.compute_share.<dtype>` (where a dtype's share differs), `gpu.memory.reserved`, `gpu.sms`,
            `gpu.l2`, `gpu.efficiency.<kind>` (a factor on the curve of that kind, 1 by default),
            `host.issue.operator`, `host.issue.view`, `host.issue.custom`, `host.issue.collective`, `host.sync`.
        curves: share of memory bandwidth by operator kind (key `<kind>`) against bytes moved; `product.<dtype>` the
            share of the peak rate against FLOPs, which replaces `gpu.product.compute_share` where it is given.
    """

    name: str
    title: str
    kind: str
    parameters: Mapping[str, Parameter]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    digest: str = ""


@dataclass(frozen=True)
class Topology:
    """Nodes of GPUs, their links and NICs.

    Attributes:
        name: `4x8-titan-rtx`.
        hardware: the GPU of every rank.
        nodes, gpus_per_node: N and G.
        link_kind: `nvlink`, `pcie`, `shared-memory`.
        nics_per_node: NICs that the node's GPUs share.
        link_parameters: `link.bandwidth` (achieved bytes/s a GPU sends, and receives, inside the node), `link.latency`,
            `link.message` (cost of a message), `link.eager.latency` and `link.eager.bandwidth` (of a second protocol,
            which the library takes where it is faster, for small messages), `bridge.bandwidth` (all in-node traffic
            together; absent: no limit),
            `nic.bandwidth` (bytes/s each way of one NIC), `nic.latency`, `nic.message` (cost of a message on the NIC),
            `fabric.share` (share of the NICs' bandwidth that the fabric carries at once), `collective.fixed`,
            `spine.share` (in a rail topology: share of it that spines carry between NICs at different places of nodes;
            absent: no rails) and `spine.latency` (that such a change adds),
            `switch.buffer` (bytes that a switch port holds before it drops; absent: always deep enough; it delays
            nothing in `sim`, which says where it would not do: metric `port_pressure`),
            `nic.payload_share` and `nic.message_bytes` (the wire carries payload / share + messages x bytes);
            of programs that move bytes between tiers: `storage.read.bandwidth`, `storage.write.bandwidth` and
            `host.memory.bandwidth` (of a node, which its GPUs share), `storage.latency`, `copy.bandwidth` and
            `copy.latency` (between host memory and one GPU, each way);
            of ranks that are processes of one computer: `host.cores` (that all of them share), `host.message` and
            `host.stream` (processor time of a message, and bytes that a second of it passes on, sending and receiving).
    """

    name: str
    title: str
    hardware: Hardware
    nodes: int
    gpus_per_node: int
    link_kind: str
    nics_per_node: int
    link_parameters: Mapping[str, Parameter]
    notes: tuple[str, ...] = ()
    digest: str = ""

    @property
    def node_type(self) -> str:
        """The name without the size: `titan-rtx`."""
        return self.name.removeprefix(f"{self.nodes}x{self.gpus_per_node}-")

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.gpus_per_node

    def node_of(self, rank: int) -> int:
        """Node of a rank; numbering is node-major."""
        return rank // self.gpus_per_node

    def parameters(self) -> dict[str, Parameter]:
        """Every parameter of the machine by name, hardware and links together."""
        return {**self.hardware.parameters, **self.link_parameters}
