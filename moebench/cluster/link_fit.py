"""From timed exchanges to the numbers of a Topology file: processor time, bytes on the wire, rates, latencies.

Each number comes from the exchanges that it rules: processor time and wire from counters, in every exchange; latency
from the smallest, rates from the largest. Nothing is fitted to a layer's time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from moebench.cluster.exchanges import ALL_REDUCE, FLAT, IN_NODE, IN_NODE_ALL_REDUCE, NOTHING
from moebench.cluster.probes import Exchange, Seen
from moebench.local.fit import Range, range_of

TINY_BYTES = 256
_LEAST_S = 1e-7
_GROUPS = 3


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
    """What the ranks saw, sample by sample, put together."""
    found = []
    barriers = _barrier_bytes(exchanges, reports)
    for index, exchange in enumerate(exchanges):
        samples = [seen for seen in zip(*reports, strict=True) if seen[0].exchange == index]
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
            found["fabric.share"] = self._fabric_share(found)
        return found

    def _of(self, *kinds: str) -> list[Timed]:
        return [t for t in self.found if t.exchange.kind in kinds]

    def _messages(self, t: Timed) -> int:
        """That all ranks send in one call of an all-to-all."""
        group = self.place.ranks_per_node if t.exchange.kind == IN_NODE else self.place.ranks
        return self.place.ranks * (group - 1)

    def _message(self) -> Range:
        """Processor time of a message: of the smallest exchanges, issue taken off."""
        per = [
            (cpu_s - self.place.ranks * self.issue_s) / self._messages(t)
            for t in self._of(FLAT, IN_NODE)
            for cpu_s in _medians(t.cpu_s)
            if t.exchange.bytes_per_peer <= TINY_BYTES
        ]
        return range_of([max(p, _LEAST_S) for p in per])

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
        """One latency a step of a ring, and what a collective takes besides, from its smallest all-to-all and ring."""
        place = self.place
        across = place.nodes > 1
        in_node = (IN_NODE, IN_NODE_ALL_REDUCE) if across else (FLAT, ALL_REDUCE)
        link_s = [0.0]
        if place.ranks_per_node > 1:
            link_s, fixed_s = self._solved(*in_node, place.ranks_per_node, lambda steps: (steps, 0), [0.0])
        found = {"link.latency": range_of([max(v, _LEAST_S) for v in link_s])}
        if across:
            ring = place.ranks

            def split(steps: int) -> tuple[int, int]:
                crossing = 2 * (place.nodes - 1)
                return steps - crossing if place.ranks_per_node > 1 else 0, crossing

            nic_s, fixed_s = self._solved(FLAT, ALL_REDUCE, ring, split, link_s)
            found["nic.latency"] = range_of([max(v, _LEAST_S) for v in nic_s])
        found["collective.fixed"] = range_of([max(v, _LEAST_S) for v in fixed_s])
        return found

    def _solved(
        self,
        even: str,
        ring: str,
        ranks: int,
        split: Callable[[int], tuple[int, int]],
        link_s: Sequence[float],
    ) -> tuple[list[float], list[float]]:
        """Latency of a step, and the fixed part, of each group of samples.

        all-to-all = fixed + max(latency, cores); ring = fixed + steps x latency + cores, those of another tier known.
        """
        smallest = [self._smallest(kind) for kind in (even, ring)]
        issue_s = self.issue_s * self.crowding
        steps = 2 * (ranks - 1)
        inside, crossing = split(steps)
        own = crossing or inside
        known_s = median(link_s) * inside if crossing else 0.0
        messages_s = self.message.value * self.crowding
        even_cores_s, ring_cores_s = (ranks - 1) * messages_s, steps * messages_s
        latencies, fixed = [], []
        for even_s, ring_s in zip(*(_medians(t.span_s) for t in smallest)):
            even_s = max(even_s - issue_s, _LEAST_S)
            left_s = ring_s - issue_s - known_s - ring_cores_s
            latency_s = (left_s - max(even_s - even_cores_s, 0.0)) / own
            if latency_s > even_cores_s and own > 1:
                latency_s = (left_s - even_s) / (own - 1)
            latency_s = min(max(latency_s, 0.0), even_s)
            latencies.append(latency_s)
            fixed.append(max(even_s - max(latency_s, even_cores_s), 0.0))
        return latencies, fixed

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

    def _fabric_share(self, found: dict[str, Range]) -> Range:
        """What the NICs carry at once, of the largest exchange that they and not the cores hold up."""
        large = self._largest(FLAT)
        if not self.place.nic_bytes_per_s:
            return Range(1.0, 1.0, 1.0)
        payload = self._crossing(large) * large.exchange.bytes_per_peer
        wire = payload / found["nic.payload_share"].value
        wire += self._crossing(large) * found["nic.message_bytes"].value
        line_s = wire / self.place.nodes / self.place.nic_bytes_per_s
        spent_s = found["collective.fixed"].value + self.issue_s * self.crowding
        return _narrow([min(1.0, line_s / max(span - spent_s, _LEAST_S)) for span in _medians(large.span_s)])


def _medians(values: Sequence[float]) -> list[float]:
    """Of as many groups as repeats of a measurement are worth: single samples of a crowd of processes are far off."""
    return [median(values[start::_GROUPS]) for start in range(min(_GROUPS, len(values)))]


def _counted(values: Sequence[float]) -> Range:
    """Of what is counted and not timed: nothing is known to wander beyond its extremes."""
    return Range(median(values), min(values), max(values))


def _narrow(shares: Sequence[float]) -> Range:
    """Median and widened extremes, at most 1."""
    found = range_of(shares)
    return Range(found.value, found.low, min(1.0, found.high))
