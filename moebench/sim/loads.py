"""The load of a collective: exact bytes and messages on each tier, under each algorithm that a library may choose.

Apart from the times because loads depend on the group's shape only: they are exact, and tests hold them against
closed forms. Balanced collectives are closed forms of the node shares, so 1,440 ranks cost no more than 8; uneven ones
take one row of bytes for each distinct rank.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moebench.program import Collective
from moebench.sim.layout import NodeShare, Spread, node_shares, spread_rows
from moebench.sim.rails import even_crossing, has_rails, is_aligned, rails_of, uneven_crossing
from moebench.workloads.machine import Topology

Rows = Sequence[tuple[Sequence[int], Sequence[int]]]  # (ranks that a row stands for, bytes to each peer)


@dataclass(frozen=True, slots=True)
class TierUse:
    """What a collective sends over one kind of link.

    Attributes:
        rank_bytes, rank_messages: sent by the rank that sends most.
        total_bytes, total_messages: sent by all ranks of the group.
    """

    rank_bytes: float = 0
    rank_messages: float = 0
    total_bytes: float = 0
    total_messages: float = 0


@dataclass(frozen=True, slots=True)
class Load:
    """One collective under one algorithm, before any rate is known.

    Attributes:
        copy_bytes: own chunk that a rank copies to itself.
        link_bytes, link_messages: of the busiest GPU, in its busier direction.
        bridge_bytes: all in-node traffic of the busiest node.
        nic_bytes, nic_messages: of the busiest node, in its busier direction.
        fabric_bytes: all traffic between nodes.
        spine_bytes, spine_messages: what of that changes rails, as if all rails were as busy as the busiest.
        nodes, nics: nodes in the group; NICs a node that its ranks reach.
        link_steps, nic_steps, spine_steps: latencies on the longest path; the last beside those of the NICs.
        in_sequence: whether the steps depend on each other, so that latencies of all tiers add up.
        use: sent bytes and messages by tier (`link`, `nic`).
    """

    copy_bytes: float = 0
    link_bytes: float = 0
    link_messages: float = 0
    bridge_bytes: float = 0
    nic_bytes: float = 0
    nic_messages: float = 0
    fabric_bytes: float = 0
    spine_bytes: float = 0
    spine_messages: float = 0
    nodes: int = 1
    nics: int = 1
    link_steps: int = 0
    nic_steps: int = 0
    spine_steps: int = 0
    in_sequence: bool = False
    use: Mapping[str, TierUse] | None = None


def loads(collective: Collective, topology: Topology, rows: Rows | None = None) -> list[Load]:
    """The load under each algorithm that the library may choose; one empty load where the group is one rank.

    Rings, chains and trees stay on their rails where the group has the same ones on every node; else all that they send
    between nodes passes the spines. An all-to-all sends straight to its peer, from rail to rail.

    Raises:
        ValueError: unknown algorithm.
    """
    found = _loads(collective, topology, rows)
    if not has_rails(topology) or is_aligned(collective.ranks, topology):
        return found
    return [_off_rails(load) if load.in_sequence and load.use and not load.spine_bytes else load for load in found]


def _loads(collective: Collective, topology: Topology, rows: Rows | None) -> list[Load]:
    if len(collective.ranks) == 1:
        return [Load()]
    if collective.algorithm == "all_to_all":
        if collective.bytes_per_peer is None or rows is not None:
            return [_uneven(collective, topology, rows or [(collective.ranks, collective.send_bytes)])]
        chunk = collective.bytes_per_peer
        load = _even_all_to_all(chunk, node_shares(collective.ranks, topology), topology)
        return [_over_spines(load, chunk, collective, topology) if has_rails(topology) else load]
    shares = node_shares(collective.ranks, topology)
    size = float(collective.bytes_per_peer or 0)
    ranks = len(collective.ranks)
    if collective.algorithm in ("all_gather", "reduce_scatter"):
        own = size if collective.algorithm == "all_gather" else 0.0
        return [_ring(size, ranks - 1, 1, own, shares, topology)]
    is_gloo = topology.hardware.kind == "cpu"
    if collective.algorithm == "all_reduce":
        ring = _ring(size / ranks, 2 * (ranks - 1), 2, 0.0, shares, topology)
        return [ring] if is_gloo else [ring, _tree(size, shares, topology)]  # gloo has no tree
    if collective.algorithm in ("broadcast", "reduce"):
        if not is_gloo:
            return [_chain(size, shares, topology)]
        if collective.algorithm == "broadcast":
            return [_binomial_tree(size, collective, topology)]
        ring = _ring(size / ranks, ranks - 1, 1, 0.0, shares, topology)
        return [_one_after_the_other(ring, _gather(size / ranks, collective, topology))]
    raise ValueError(f"unknown collective {collective.algorithm!r}")


def _even_all_to_all(chunk: int, shares: Sequence[NodeShare], topology: Topology) -> Load:
    """Grouped send/recv: every rank sends `chunk` bytes to every other, all at once."""
    ranks = sum(share.members * share.nodes for share in shares)
    most, least = max(s.members for s in shares), min(s.members for s in shares)
    inside = sum(s.nodes * s.members * (s.members - 1) for s in shares)
    outside = sum(s.nodes * s.members * (ranks - s.members) for s in shares)
    leaving = max(s.members * (ranks - s.members) for s in shares)
    sent = 1 if chunk else 0
    return Load(
        copy_bytes=chunk,
        link_bytes=(most - 1) * chunk,
        link_messages=(most - 1) * sent,
        bridge_bytes=max(s.members * (s.members - 1) for s in shares) * chunk,
        nic_bytes=leaving * chunk,
        nic_messages=leaving * sent,
        fabric_bytes=outside * chunk,
        nodes=sum(s.nodes for s in shares),
        nics=_nics(most, topology),
        link_steps=min(1, (most - 1) * sent),
        nic_steps=min(1, leaving * sent),
        use={
            "link": TierUse((most - 1) * chunk, (most - 1) * sent, inside * chunk, inside * sent),
            "nic": TierUse((ranks - least) * chunk, (ranks - least) * sent, outside * chunk, outside * sent),
        },
    )


def _uneven(collective: Collective, topology: Topology, rows: Rows) -> Load:
    """Grouped send/recv with a matrix of bytes; zero entries are not sent."""
    sent, messages = _spreads(
        _fixed(collective.ranks), tuple((_fixed(r), tuple(row)) for r, row in rows), topology.gpus_per_node
    )
    load = Load(
        copy_bytes=sent.own,
        link_bytes=sent.link,
        link_messages=messages.link,
        bridge_bytes=sent.node_inside,
        nic_bytes=sent.nic,
        nic_messages=messages.nic,
        fabric_bytes=sent.outside,
        nodes=sent.nodes,
        nics=_nics(sent.members, topology),
        link_steps=min(1, messages.link),
        nic_steps=min(1, messages.nic),
        use={
            "link": TierUse(sent.rank_inside, messages.rank_inside, sent.inside, messages.inside),
            "nic": TierUse(sent.rank_outside, messages.rank_outside, sent.outside, messages.outside),
        },
    )
    if not has_rails(topology):
        return load
    crossing = uneven_crossing(collective.ranks, rows, topology)
    as_messages = [(covered, [int(size > 0) for size in row]) for covered, row in rows]
    rails, messages_busiest = rails_of(topology), uneven_crossing(collective.ranks, as_messages, topology).busiest
    return replace(
        load,
        spine_bytes=rails * crossing.busiest,
        spine_messages=rails * messages_busiest,
        spine_steps=min(1, messages_busiest),
    )


def _off_rails(load: Load) -> Load:
    """A ring's, chain's or tree's load where all that leaves a node changes rails."""
    assert load.use is not None
    messages = load.use["nic"].total_messages
    return replace(load, spine_bytes=load.fabric_bytes, spine_messages=messages, spine_steps=load.nic_steps)


def _over_spines(load: Load, chunk: int, collective: Collective, topology: Topology) -> Load:
    """An even exchange's load with what changes rails."""
    messages = rails_of(topology) * even_crossing(collective.ranks, topology).busiest if chunk else 0
    return replace(load, spine_bytes=messages * chunk, spine_messages=messages, spine_steps=min(1, messages))


@functools.lru_cache(maxsize=256)  # the same exchange is priced on every machine of that size
def _spreads(
    ranks: Sequence[int], rows: tuple[tuple[Sequence[int], tuple[int, ...]], ...], gpus_per_node: int
) -> tuple[Spread, Spread]:
    """Bytes, and messages."""
    messages = [(covered, [int(size > 0) for size in row]) for covered, row in rows]
    return spread_rows(ranks, rows, gpus_per_node), spread_rows(ranks, messages, gpus_per_node)


def _fixed(ranks: Sequence[int]) -> Sequence[int]:
    """What can be a key."""
    return ranks if isinstance(ranks, range) else tuple(ranks)


def _ring(
    step_bytes: float, steps: int, rounds: int, own: float, shares: Sequence[NodeShare], topology: Topology
) -> Load:
    """A ring in node order, one a NIC, each with its part of the data; `rounds` times round the nodes."""
    nodes, most = sum(s.nodes for s in shares), max(s.members for s in shares)
    ranks = sum(s.members * s.nodes for s in shares)
    nics = _nics(most, topology)
    volume = step_bytes * steps
    crossing = nodes if nodes > 1 else 0
    inside = ranks - crossing
    busiest = (most - 1 if crossing else most) if most > 1 else 0
    moves = 1 if volume else 0
    on_link, on_nic = (moves if inside else 0), (moves if crossing else 0)
    nic_steps = rounds * (nodes - 1) * moves
    return Load(
        copy_bytes=own,
        link_bytes=volume * on_link,
        link_messages=steps * on_link,
        bridge_bytes=busiest * volume,
        nic_bytes=volume * on_nic,
        nic_messages=steps * nics * on_nic,
        fabric_bytes=crossing * volume,
        nodes=nodes,
        nics=nics,
        link_steps=(steps - nic_steps) * on_link,
        nic_steps=nic_steps,
        in_sequence=True,
        use={
            "link": TierUse(volume * on_link, steps * on_link, inside * volume, inside * steps * moves),
            "nic": TierUse(
                volume * on_nic, steps * nics * on_nic, crossing * volume, crossing * steps * nics * moves
            ),
        },
    )


def _chain(size: float, shares: Sequence[NodeShare], topology: Topology) -> Load:
    """NCCL's broadcast and reduce: from rank to rank in node order, one ring a NIC, in pieces that follow each other.

    Every rank but the last passes everything on; which one is the root does not matter. The time in which the pipeline
    fills is in the latencies only.
    """
    nodes, most = sum(s.nodes for s in shares), max(s.members for s in shares)
    ranks = sum(s.members * s.nodes for s in shares)
    nics = _nics(most, topology)
    moves = 1 if size else 0
    inside, crossing = ranks - nodes, nodes - 1
    on_link, on_nic = (moves if inside else 0), (moves if crossing else 0)
    return Load(
        link_bytes=size * on_link,
        link_messages=on_link,
        bridge_bytes=(most - 1) * size,
        nic_bytes=size * on_nic,
        nic_messages=nics * on_nic,
        fabric_bytes=crossing * size,
        nodes=nodes,
        nics=nics,
        link_steps=inside * moves,
        nic_steps=crossing * moves,
        in_sequence=True,
        use={
            "link": TierUse(size * on_link, on_link, inside * size, inside * moves),
            "nic": TierUse(size * on_nic, nics * on_nic, crossing * size, crossing * nics * moves),
        },
    )


def _binomial_tree(size: float, collective: Collective, topology: Topology) -> Load:
    """gloo's broadcast: in each step everyone who has the whole message sends it to one who does not.

    Which rank is the root is not known here: priced as if it were the first.
    """
    ranks = len(collective.ranks)
    steps = []
    for distance in (2**step for step in range((ranks - 1).bit_length())):
        peers = {rank: rank + distance for rank in range(min(distance, ranks - distance))}
        steps.append(_uneven(collective, topology, _one_message_each(collective, peers, size)))
    return functools.reduce(_one_after_the_other, steps)


def _gather(size: float, collective: Collective, topology: Topology) -> Load:
    """The end of gloo's reduce: every rank sends its part of the sum to the root, priced as if it were the first."""
    peers = dict.fromkeys(range(1, len(collective.ranks)), 0)
    return _uneven(collective, topology, _one_message_each(collective, peers, size))


def _one_message_each(collective: Collective, peers: Mapping[int, int], size: float) -> Rows:
    """Rows of an exchange in which some ranks send `size` bytes to one peer, both by place in the group."""
    ranks = len(collective.ranks)
    sent = [[0] * ranks for _ in range(ranks)]
    for rank, peer in peers.items():
        sent[rank][peer] = round(size)
    return [((rank,), row) for rank, row in zip(collective.ranks, sent)]


def _one_after_the_other(first: Load, second: Load) -> Load:
    """Two phases of one collective; `use` is right where the same rank sends most in both."""

    def added(a: TierUse, b: TierUse) -> TierUse:
        return TierUse(*(getattr(a, name) + getattr(b, name) for name in TierUse.__dataclass_fields__))

    assert first.use is not None
    assert second.use is not None
    use = {tier: added(first.use[tier], second.use[tier]) for tier in first.use}
    sums = {
        name: getattr(first, name) + getattr(second, name)
        for name in Load.__dataclass_fields__
        if name not in ("nodes", "nics", "in_sequence", "use")
    }
    return Load(nodes=first.nodes, nics=first.nics, in_sequence=True, use=use, **sums)


def _tree(size: float, shares: Sequence[NodeShare], topology: Topology) -> Load:
    """Two complementary binary trees over nodes, each with half of the data, and a chain inside each node."""
    nodes, most = sum(s.nodes for s in shares), max(s.members for s in shares)
    ranks = sum(s.members * s.nodes for s in shares)
    nics = _nics(most, topology)
    hops = ranks - nodes  # in-node chain edges; each carries the data up and down
    moves = 1 if size else 0
    link_copies = min(2, most - 1)  # the middle of a chain sends both ways
    nic_copies = min(2, nodes - 1)  # inner node of one tree, leaf of the other; two nodes: one child each
    depth = math.ceil(math.log2(nodes)) if nodes > 1 else 0
    return Load(
        link_bytes=link_copies * size,
        link_messages=2 * (most - 1) * moves,
        bridge_bytes=2 * (most - 1) * size,
        nic_bytes=nic_copies * size,
        nic_messages=max(2 * nic_copies, 2 * depth) * nics * moves,
        fabric_bytes=2 * (nodes - 1) * size,
        nodes=nodes,
        nics=nics,
        link_steps=2 * (most - 1) * moves,
        nic_steps=2 * depth * moves,
        in_sequence=True,
        use={
            "link": TierUse(link_copies * size, link_copies * moves, 2 * hops * size, 2 * hops * moves),
            "nic": TierUse(
                nic_copies * size, 2 * nic_copies * moves, 2 * (nodes - 1) * size, 4 * (nodes - 1) * moves
            ),
        },
    )


def _nics(members: int, topology: Topology) -> int:
    """NICs that `members` ranks of a node reach: each GPU drives those next to it."""
    reached = math.ceil(members * topology.nics_per_node / topology.gpus_per_node)
    return max(1, min(topology.nics_per_node, reached))
