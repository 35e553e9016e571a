"""What Tutel leaves to be chosen: degree of pipelining, exchange, parallelism; and how `tutel` chooses here.

The paper searches at run time on the machine at hand; the package leaves it to its user. Here a rule decides from the
workload and the ranks alone, so that a case is one program on every machine and in every engine. Its two thresholds
were set by simulating all degrees with both exchanges on 540 points (three gates, two dtypes, 1 to 32 sequences, 1x8 to
16x8, six node types from TITAN RTX to H100): against the best of them it loses 2 % on average; from 8 sequences on, on
Turing and Volta nodes, at most 1 %; on small steps of fast machines up to a third, and there a suite should list the
variants too.

B bytes that a rank sends in an exchange, W ranks, N nodes, S ranks that share an expert.
"""

from collections.abc import Sequence

from moebench.kernels.collectives.group import Group
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.layer import LayerWorkload

DEGREES: Sequence[int] = (1, 2, 4, 8)
LEAST_MESSAGE_BYTES = 2**18  # to a peer: below it, a link waits more than it carries
LEAST_CHUNK_BYTES = 2**22  # of all messages of a chunk: below it, launches take longer than what they launch


def exchange(workload: LayerWorkload, group: Group) -> str:
    """`2d` among several nodes where flat messages could not be split in two; else `flat`."""
    is_small = payload_bytes(workload) < 2 * LEAST_MESSAGE_BYTES * group.size
    return "2d" if is_small and _nodes(group) > 1 else "flat"


def degree(workload: LayerWorkload, group: Group, exchange: str) -> int:
    """The most chunks that keep chunks and messages (of `2d` those between nodes) from being too small; alone one."""
    payload = payload_bytes(workload)
    peers = _nodes(group) if exchange == "2d" else group.size
    fitting = [
        d for d in DEGREES if payload >= d * LEAST_CHUNK_BYTES and payload >= d * peers * LEAST_MESSAGE_BYTES
    ]
    return max(fitting, default=1) if group.size > 1 else 1


def parallelism(workload: LayerWorkload, group: Group) -> int:
    """r: 1 where ranks hold whole experts, the package's default; else what moves the fewest bytes."""
    sharers = workload.sharers(group.size)
    if sharers == 1:
        return 1
    return min(possible_r(sharers), key=lambda r: moved_bytes(workload, group.size, r))


def possible_r(sharers: int) -> list[int]:
    """0 and the divisors of S."""
    return [r for r in range(sharers + 1) if r == 0 or sharers % r == 0]


def moved_bytes(workload: LayerWorkload, ranks: int, r: int) -> float:
    """What a rank sends in a step: four exchanges of tokens, weights gathered and their gradients scattered."""
    tokens = 4 * r * payload_bytes(workload) * (ranks - 1) / ranks
    products = 3 if workload.activation == "swiglu" else 2
    whole = products * workload.experts * workload.d_model * workload.d_ffn
    held = whole * torch_dtype(workload.dtype).itemsize / ranks
    gathered_from = ranks if r == 0 else workload.sharers(ranks) // r
    return tokens + 2 * (gathered_from - 1) * held


def payload_bytes(workload: LayerWorkload) -> float:
    """B, before slots are rounded up: K choices of T tokens times the capacity factor."""
    rows = workload.gate.top_k * workload.capacity_factor * workload.tokens
    return rows * workload.d_model * torch_dtype(workload.dtype).itemsize


def _nodes(group: Group) -> int:
    """N; 1 where nobody said, where a node has one rank, or where nodes are unequal, which a `2d` exchange refuses."""
    per_node = group.ranks_per_node
    if per_node is None or per_node == 1 or group.size % per_node:
        return 1
    return group.size // per_node
