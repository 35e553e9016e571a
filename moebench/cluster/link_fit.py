"""From timed exchanges to the numbers of a Topology file: processor time, bytes on the wire, rates, latencies.

Each number comes from the exchanges that it rules: processor time and wire from counters, in every exchange; latency
from the smallest, rates from the largest. Nothing is fitted to a layer's time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from moebench.cluster.exchanges import ALL_REDUCE, FLAT, IN_NODE, IN_NODE_ALL_REDUCE, NOTHING
from moebench.cluster.probes import Exchange, Seen
from moebench.local.fit import Range, range_of

TINY_BYTES = 256
_LEAST_S = 1e-7
_GROUPS = 3
_RESOLUTION = 0.02  # share of a span to which it is known: quiet repeats differ by that


@dataclass(frozen=True)
class Place:
    """Where exchanges run: nodes, ranks on each, cores of the computer, bytes/s of a NIC (None: loopback alone)."""

    nodes: int
    ranks_per_node: int
    cores: int
    nic_bytes_per_s: float | None
    switch_buffer_bytes: int = 512 << 10

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Timed:
    """One exchange, its samples in order.

    Attributes:
        span_s: of one call, first in to last out; cpu_s: of all ranks together.
        wire_bytes: that left all nodes in one call, those of the barriers around a sample taken off; empty where
            nobody counts.
    """

    exchange: Exchange
    span_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    wire_bytes: tuple[float, ...]
    calls: tuple[int, ...]
    drops: tuple[int, ...] = ()


def timed(exchanges: Sequence[Exchange], reports: Sequence[Sequence[Seen]]) -> list[Timed]:
    """What the ranks saw, sample by sample, put together; an exchange that is listed several times is one."""
    found = []
    barriers = _barrier_bytes(exchanges, reports)
    for exchange in dict.fromkeys(exchanges):
        samples = [seen for seen in zip(*reports, strict=True) if exchanges[seen[0].exchange] == exchange]
        calls = [seen[0].calls for seen in samples]
        spans = [max(s.end_s for s in seen) - min(s.start_s for s in seen) for seen in samples]
        found.append(
            Timed(
                exchange,
                tuple(span / count for span, count in zip(spans, calls)),
                tuple(sum(s.cpu_s for s in seen) / count for seen, count in zip(samples, calls)),
                tuple((_sent(seen[0]) - barriers) / c for seen, c in zip(samples, calls) if seen[0].nics),
                tuple(calls),
                tuple(sum(n.switch_drops for n in seen[0].nics) for seen in samples),
            )
        )
    return found


def _sent(seen: Seen) -> int:
    return sum(nic.sent_bytes for nic in seen.nics)


def _barrier_bytes(exchanges: Sequence[Exchange], reports: Sequence[Sequence[Seen]]) -> float:
    """What the barriers of a sample send: all that there is in a sample of nothing."""
    idle = [_sent(seen) for seen in reports[0] if exchanges[seen.exchange].kind == NOTHING]
    return median(idle) if idle else 0.0


def fit_links(found: Sequence[Timed], place: Place, issue_s: float) -> dict[str, Range]:
    """Parameters of moebench.workloads.machine.Topology with their ranges.

    Args:
        issue_s: processor time of a rank to issue one collective, which is in every exchange.
    """
    return _Links(found, place, issue_s).parameters()


class _Links:
    def __init__(self, found: Sequence[Timed], place: Place, issue_s: float) -> None:
        self.found, self.place, self.issue_s = found, place, issue_s
        self.crowding = max(1.0, place.ranks / place.cores)

    def parameters(self) -> dict[str, Range]:
        """All of them, in the order in which each needs those before it."""
        place, exact = self.place, Range(self.place.cores, self.place.cores, self.place.cores)
        self.message = self._message()
        self.stream = self._stream()
        found = {"host.cores": exact, "host.message": self.message, "host.stream": self.stream}
        if place.nodes > 1 and place.nic_bytes_per_s:
            found |= self._wire()
        found |= self._latencies()
        found["link.message"] = Range(0.0, 0.0, 0.0)  # it is in host.message and nic.message_bytes
        found["link.bandwidth"] = self._link_bandwidth()
        if place.nodes > 1:
            found["nic.message"] = Range(0.0, 0.0, 0.0)
            found["fabric.share"] = self._fabric_share()
        return found

    def _of(self, *kinds: str) -> list[Timed]:
        return [t for t in self.found if t.exchange.kind in kinds]

    def _messages(self, t: Timed) -> int:
        """That all ranks send in one call of an all-to-all."""
        group = self.place.ranks_per_node if t.exchange.kind == IN_NODE else self.place.ranks
        return self.place.ranks * (group - 1)

    def _message(self) -> Range:
        """Processor time of a message: of the smallest exchanges, issue taken off.

        gloo's network thread at times polls in circles (most of its time is then in epoll_wait, without data), so that
        a sample is the work and an idle part that differs from one to the next: the lower quartile is nearest to the
        work.
        """
        groups: list[list[float]] = [[] for _ in range(_GROUPS)]
        for t in self._of(FLAT, IN_NODE):
            if t.exchange.bytes_per_peer <= TINY_BYTES:
                for group, samples in zip(groups, _grouped(t.cpu_s)):
                    group += [(cpu_s - self.place.ranks * self.issue_s) / self._messages(t) for cpu_s in samples]
        per = [value for group in groups for value in group]
        least, low = (max(float(q), _LEAST_S) for q in np.quantile(per, (0.0, 0.25)))
        middles = [median(group) for group in groups if group]
        return Range(low, 0.5 * least, max(2 * low, *middles))

    def _stream(self) -> Range:
        """Bytes that a second of processor time sends and receives: of the largest exchanges, less the smallest."""
        rates = []
        for kind in (FLAT, IN_NODE):
            if not self._of(kind):
                continue
            small, large = self._smallest(kind), self._largest(kind)
            moved = self._messages(large) * large.exchange.bytes_per_peer
            rates += [
                moved / max(more_s - less_s, 0.1 * more_s)
                for more_s, less_s in zip(_medians(large.cpu_s), _medians(small.cpu_s))
            ]
        return range_of(rates)

    def _largest(self, kind: str) -> Timed:
        return max(self._of(kind), key=lambda t: t.exchange.bytes_per_peer)

    def _smallest(self, kind: str) -> Timed:
        return min(self._of(kind), key=lambda t: t.exchange.bytes_per_peer)

    def _crossing(self, t: Timed) -> int:
        """Messages between nodes in one flat exchange."""
        return self.place.ranks * (self.place.ranks - self.place.ranks_per_node)

    def _wire(self) -> dict[str, Range]:
        """Bytes that a message adds, and the payload's share of the rest; counted, so nearly exact."""
        tiny = [t for t in self._of(FLAT) if t.exchange.bytes_per_peer <= TINY_BYTES]
        large = self._largest(FLAT)
        added = [
            wire / self._crossing(t) - t.exchange.bytes_per_peer for t in tiny for wire in t.wire_bytes
        ]
        message = _counted(added)
        payload = self._crossing(large) * large.exchange.bytes_per_peer
        around = self._crossing(large) * message.value
        shares = [min(1.0, payload / max(wire - around, 1.0)) for wire in large.wire_bytes]
        return {"nic.message_bytes": message, "nic.payload_share": _counted(shares)}

    def _latencies(self) -> dict[str, Range]:
        """Latency of a step of a ring inside a node and across nodes, and what a collective takes besides.

        Inside: all-to-all = fixed + max(latency, cores), both as small as can be. Across: what large exchanges take
        beyond the wire, since small ones are ruled by how the system wakes processes that have nothing else to do.
        Either way: ring = fixed + steps x latency + cores.
        """
        place = self.place
        across, found = place.nodes > 1, {}
        link_s, fixed_s, known_to_s = [0.0], [0.0], 0.0
        if place.ranks_per_node > 1:
            even, ring = (IN_NODE, IN_NODE_ALL_REDUCE) if across else (FLAT, ALL_REDUCE)
            cores_s = (place.ranks_per_node - 1) * self.message.value * self.crowding
            spans_s = _medians(self._smallest(even).span_s)
            beyond_s = [max(span_s - self._issue_s - cores_s, 0.0) for span_s in spans_s]
            link_s, fixed_s = self._solved(beyond_s, ring, 2 * (place.ranks_per_node - 1), 0.0)
            known_to_s = _RESOLUTION * median(spans_s)
        found["link.latency"] = _difference(link_s, known_to_s)
        if across:
            steps, crossing = 2 * (place.ranks - 1), 2 * (place.nodes - 1)
            known_s = (steps - crossing) * median(link_s) if place.ranks_per_node > 1 else 0.0
            own = crossing if place.ranks_per_node > 1 else steps
            nic_s, fixed_s = self._solved([beyond for _, beyond in self._lines()], ALL_REDUCE, own, known_s)
            known_to_s = _RESOLUTION * median(self._largest(FLAT).span_s)
            found["nic.latency"] = _difference(nic_s, known_to_s)
        return {**found, "collective.fixed": _difference(fixed_s, known_to_s)}

    @property
    def _issue_s(self) -> float:
        return self.issue_s * self.crowding

    def _solved(
        self, beyond_s: Sequence[float], ring: str, own: int, known_s: float
    ) -> tuple[list[float], list[float]]:
        """Latency of a step, and the fixed part, of each group of samples.

        Latency is never more than an all-to-all shows: what a small ring takes longer than that is the waking of
        processes that wait for each other in turn, which an exchange of many bytes does not have.

        Args:
            beyond_s: fixed + latency of an all-to-all.
            own: steps of the ring that have this latency; known_s: what its other steps take.
        """
        reduced = self._smallest(ring)
        group = self.place.ranks_per_node if ring == IN_NODE_ALL_REDUCE else self.place.ranks
        cores_s = 2 * (group - 1) * self.message.value * self.crowding
        latencies = []
        for ring_s, even_s in zip(_medians(reduced.span_s), beyond_s):
            step_s = (ring_s - self._issue_s - known_s - cores_s - even_s) / max(own - 1, 1)
            latencies.append(min(max(step_s, 0.0), even_s))
        return latencies, [even_s - latency_s for even_s, latency_s in zip(beyond_s, latencies)]

    def _lines(self) -> list[tuple[float, float]]:
        """Share of the wire that flat exchanges reach, and what they take beyond it: lines through the larger two."""
        middle, large = sorted(self._of(FLAT), key=lambda t: t.exchange.bytes_per_peer)[-2:]
        rate = self.place.nodes * (self.place.nic_bytes_per_s or 1.0)
        less_s, more_s = (median(t.wire_bytes) / rate for t in (middle, large))
        found = []
        for short_s, long_s in zip(_medians(middle.span_s), _medians(large.span_s)):
            share = min(1.0, (more_s - less_s) / max(long_s - short_s, 1e-3 * long_s))
            found.append((share, max(long_s - self._issue_s - more_s / share, 0.0)))
        return found

    def _link_bandwidth(self) -> Range:
        """Bytes/s that a rank sends inside its node, by what more bytes take; without a peer there, a core's stream."""
        place = self.place
        if place.ranks_per_node == 1:
            return self.stream
        kind = IN_NODE if place.nodes > 1 else FLAT
        small, large = self._smallest(kind), self._largest(kind)
        sent = (place.ranks_per_node - 1) * (large.exchange.bytes_per_peer - small.exchange.bytes_per_peer)
        spans = zip(_medians(large.span_s), _medians(small.span_s))
        return range_of([sent / max(more_s - less_s, 0.1 * more_s) for more_s, less_s in spans])

    def _fabric_share(self) -> Range:
        """What the NICs carry at once."""
        if not self.place.nic_bytes_per_s:
            return Range(1.0, 1.0, 1.0)
        return _narrow([share for share, _ in self._lines()])


def _grouped(values: Sequence[float]) -> list[Sequence[float]]:
    """Samples of each start of the ranks: they come start by start, as many from each."""
    groups = min(_GROUPS, len(values))
    cuts = [len(values) * i // groups for i in range(groups + 1)]
    return [values[low:high] for low, high in pairwise(cuts)]


def _medians(values: Sequence[float]) -> list[float]:
    """Of each start of the ranks: what the next calibration finds differs as much as these, not as single samples."""
    return [median(group) for group in _grouped(values)]


def _difference(values_s: Sequence[float], known_to_s: float) -> Range:
    """A time that is a small difference of spans: known no better than they are, however equal its repeats."""
    found = range_of([max(v, _LEAST_S) for v in values_s])
    return Range(found.value, min(found.low, max(found.value - known_to_s, 0.5 * _LEAST_S)),
                 max(found.high, found.value + known_to_s))  # fmt: skip


def _counted(values: Sequence[float]) -> Range:
    """Of what is counted and not timed: nothing is known to wander beyond its extremes."""
    return Range(median(values), min(values), max(values))


def _narrow(shares: Sequence[float]) -> Range:
    """Median and widened extremes, at most 1."""
    found = range_of(shares)
    return Range(found.value, found.low, min(1.0, found.high))
