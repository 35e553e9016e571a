"""What a trace recorded: operators on streams, with collectives, waits and host reads. Data only.

The recorder (moebench.trace) writes Programs, the replay (moebench.sim) prices them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moebench.kernels.cost import Product
from moebench.kernels.transfer import STREAM_OF

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
COMPUTE, COMMUNICATION, TO_HOST = "compute", "communication", "device-to-host"
TRANSFERS = frozenset(STREAM_OF)  # kinds of operators that move bytes between storage, host and device


@dataclass(frozen=True, slots=True)
class Collective:
    """Bytes between the ranks of a group, as the rank that launches it sees them.

    A balanced collective names one number, so that its size does not depend on the ranks; an uneven one lists the bytes
    for each peer in the group's order, itself included.

    Attributes:
        algorithm: `all_to_all` (a gather or scatter is an uneven one), `all_gather`, `reduce_scatter`, `all_reduce`,
            `broadcast`, `reduce`.
        group: the group's name (`world`, ...).
        ranks: the group's global ranks, a `range` where possible.
        bytes_per_peer: even all-to-all: bytes to each peer. all_gather: bytes that each rank contributes.
            reduce_scatter: bytes that each rank ends with. all_reduce, broadcast, reduce: bytes of the whole buffer.
            None where uneven.
        send_bytes, receive_bytes: uneven all-to-all only, one entry a peer.
        tiles: as of an operator.
    """

    algorithm: str
    group: str
    ranks: Sequence[int]
    bytes_per_peer: int | None
    send_bytes: tuple[int, ...] = ()
    receive_bytes: tuple[int, ...] = ()
    tiles: int = 1


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call.

    Attributes:
        name: qualified name, `aten::mm`.
        kind: one of `moebench.kernels.cost.KINDS`, or of `TRANSFERS`.
        stream: `compute`, `communication`, `device-to-host` or that of a transfer (`moebench.kernels.transfer`); a
            wait stands on the stream that waits.
        region: one of `moebench.kernels.region.REGIONS`.
        phase: `forward`, `backward` or `optimizer`.
        shapes: shapes of the tensor arguments, then of the results.
        dtype: of the first floating-point tensor among them, short (`fp32`, `bf16`, ...), else of the first tensor.
        waits_on: indices of collectives that must have ended before this op, and later ones on its stream, start; of a
            host read, the copies that the host waits for, where it does not wait for the whole compute stream. Of a
            transfer, what must have ended before it starts, operators of the compute stream too; nobody else waits.
        launches: kernels that the device runs one after another for it.
        tiles: it is one of so many equal parts of one kernel, which takes that share of the time that the whole kernel
            takes, start included; `products` are then those of the whole kernel.
    """

    index: int
    name: str
    kind: str
    stream: str
    region: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    products: tuple[Product, ...] = ()
    collective: Collective | None = None
    waits_on: tuple[int, ...] = ()
    launches: int = 1
    tiles: int = 1

    @property
    def bytes(self) -> int:
        """Bytes moved in device memory."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True, slots=True)
class Program:
    """The operators of one training step of one rank, and which ranks it stands for.

    Attributes:
        ops: in issue order.
        rank: the traced rank; world: ranks in all.
        stands_for: the ranks whose programs are equal to this one.
        persistent_bytes: parameters, gradients kept between steps, optimiser state and inputs.
        peak_bytes: largest sum of live storages during the step, the persistent ones included.
        notes: what the trace assumed, for the report (`assumes a fused kernel`, grouped ranks, ...).
    """

    ops: tuple[Op, ...]
    rank: int
    world: int
    stands_for: Sequence[int]
    persistent_bytes: int
    peak_bytes: int
    notes: tuple[str, ...] = ()
