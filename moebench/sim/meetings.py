"""Which programs take part in which collective, and how long it takes once they have all arrived.

A program stands for ranks; the k-th collective on a group by one program is the same as the k-th on that group by every
program that stands for another of its ranks.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moebench.program import Collective, Program
from moebench.sim.cost import Machine
from moebench.sim.layout import node_shares
from moebench.sim.loads import Rows, TierUse
from moebench.sim.network import Timing, collective_timing, link_bytes
from moebench.workloads.machine import Topology


class StuckReplay(RuntimeError):
    """A rank waits for a collective that some of its ranks never launch, or launch as another one."""


@dataclass
class Meeting:
    """One collective: the programs that must arrive, and the operator by which each has arrived."""

    group: str
    number: int
    members: frozenset[int]
    arrived: dict[int, int] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every member has launched it."""
        return len(self.arrived) == len(self.members)


class Meetings:
    """The collectives of a set of programs, resolved in the order in which each group launches them."""

    def __init__(self, programs: Sequence[Program], topology: Topology) -> None:
        self.programs = programs
        self.topology = topology
        self._numbers = [_numbered(program) for program in programs]
        self._members = self._find_members()
        self._standing = self._ranks_launching()
        self._open: dict[tuple[str, int, frozenset[int]], Meeting] = {}
        self._remembered: dict[tuple[Collective, Machine], tuple[Timing, dict[str, TierUse]]] = {}

    def arrive(self, program: int, index: int) -> Meeting | None:
        """Program `program` launches its operator `index`; the meeting, if this was the last arrival."""
        collective = self._collective(program, index)
        number, members = self._numbers[program][index], self._members[program, collective.group]
        key = (collective.group, number, members)
        meeting = self._open.setdefault(key, Meeting(collective.group, number, members))
        meeting.arrived[program] = index
        return self._open.pop(key) if meeting.is_complete else None

    def timing(self, meeting: Meeting, machine: Machine) -> tuple[Timing, dict[str, TierUse]]:
        """Time of a complete meeting, and the bytes and messages that all its groups send in it.

        Raises:
            StuckReplay: the members launch different collectives.
        """
        rows = self._rows(meeting)
        priced = [self._priced(collective, machine, rows) for collective in self._instances(meeting)]
        timings, uses = [timing for timing, _ in priced], [use for _, use in priced]
        if len(priced) == 1:
            return timings[0], self._summed(meeting, uses)
        total = np.maximum.reduce([timing.total_s for timing in timings])
        tiers = {
            tier: np.maximum.reduce([timing.tiers_s[tier] for timing in timings]) for tier in timings[0].tiers_s
        }
        return Timing(total, tiers), self._summed(meeting, uses)

    def stuck(self, waiting: Mapping[int, int]) -> StuckReplay:
        """The error that says who waits for whom; `waiting`: program -> collective (operator index) it waits for."""
        lines = []
        for meeting in self._open.values():
            absent = [f"{self.programs[p].rank}" for p in sorted(meeting.members - set(meeting.arrived))]
            program, index = next(iter(meeting.arrived.items()))
            op = self.programs[program].ops[index]
            lines.append(
                f"{op.name} number {meeting.number} on group {meeting.group!r} (operator {index} of rank "
                f"{self.programs[program].rank}) waits for rank {', '.join(absent)}"
            )
        for program, index in waiting.items():
            lines.append(f"rank {self.programs[program].rank} is blocked on its operator {index}")
        return StuckReplay("the replay is stuck: " + "; ".join(lines))

    @property
    def unfinished(self) -> bool:
        """Whether some collective was launched by some of its ranks only."""
        return bool(self._open)

    def _collective(self, program: int, index: int) -> Collective:
        found = self.programs[program].ops[index].collective
        assert found is not None
        return found

    def _priced(self, collective: Collective, machine: Machine, rows: Rows | None) -> tuple[Timing, dict[str, TierUse]]:
        """Time and use of one group's collective; balanced ones are remembered, for a step repeats them."""
        key = (collective, machine)
        if rows is not None or key not in self._remembered:
            sharing, groups = self._sharing(collective), self._groups(collective)
            timing = collective_timing(collective, self.topology, machine, rows, sharing, groups)
            found = timing, link_bytes(collective, self.topology, rows)
            if rows is not None:
                return found
            self._remembered[key] = found
        return self._remembered[key]

    def _find_members(self) -> dict[tuple[int, str], frozenset[int]]:
        """For each program and group: the programs that stand for the group's ranks, and those they bring along."""
        launched = {
            (p, op.collective.group): op.collective
            for p, program in enumerate(self.programs)
            for op in program.ops
            if op.collective is not None
        }
        if len(self.programs) == 1:
            return {key: frozenset([0]) for key in launched}
        owner = {rank: p for p, program in enumerate(self.programs) for rank in program.stands_for}
        direct: dict[tuple[int, str], set[int]] = {}
        seen: dict[Sequence[int], set[int]] = {}
        for (p, group), collective in launched.items():
            ranks = collective.ranks if isinstance(collective.ranks, range) else tuple(collective.ranks)
            if ranks not in seen:
                absent = [rank for rank in ranks if rank not in owner]
                if absent:
                    raise StuckReplay(f"group {group!r} has rank {absent[0]}, for which no program stands")
                seen[ranks] = {owner[rank] for rank in ranks}
            direct[p, group] = seen[ranks] | {p}
        return {(p, group): _closure(p, group, direct) for p, group in launched}

    def _ranks_launching(self) -> dict[str, int]:
        """How many ranks take part in each group's collectives, all groups of that name together."""
        standing: dict[str, int] = defaultdict(int)
        for p, group in self._members:
            standing[group] += len(self.programs[p].stands_for)
        return standing

    def _groups(self, collective: Collective) -> int:
        """How many groups of this name and shape run at once."""
        return max(1, round(self._standing[collective.group] / len(collective.ranks)))

    def _sharing(self, collective: Collective) -> int:
        """How many groups of this name and shape run at once through one node."""
        groups = self._standing[collective.group] / len(collective.ranks)
        if groups <= 1:
            return 1
        nodes = sum(share.nodes for share in node_shares(collective.ranks, self.topology))
        return max(1, round(groups * nodes / self.topology.nodes))

    def _instances(self, meeting: Meeting) -> list[Collective]:
        """The collective as each distinct group of ranks among the members sees it."""
        found: dict[tuple[int, int, int], Collective] = {}
        for program, index in sorted(meeting.arrived.items()):
            one = self._collective(program, index)
            other = next(iter(found.values()), one)
            if one.algorithm != other.algorithm:
                raise StuckReplay(
                    f"collective number {meeting.number} on group {meeting.group!r} is {other.algorithm} on some ranks "
                    f"and {one.algorithm} on rank {self.programs[program].rank}"
                )
            key = (one.ranks[0], one.ranks[-1], len(one.ranks))
            if key not in found or (found[key].bytes_per_peer or 0) < (one.bytes_per_peer or 0):
                found[key] = one
        return list(found.values())

    def _rows(self, meeting: Meeting) -> Rows | None:
        """What each program's ranks send, where that differs among peers or among programs; else None."""
        launched = [(p, self._collective(p, index)) for p, index in sorted(meeting.arrived.items())]
        first = launched[0][1]
        if first.algorithm != "all_to_all":
            return None
        if all(c.bytes_per_peer is not None and c.bytes_per_peer == first.bytes_per_peer for _, c in launched):
            return None
        if len(launched) == 1:
            return [(first.ranks, first.send_bytes)]
        return [
            (self.programs[p].stands_for, c.send_bytes or (c.bytes_per_peer or 0,) * len(c.ranks)) for p, c in launched
        ]

    def _summed(self, meeting: Meeting, uses: Sequence[Mapping[str, TierUse]]) -> dict[str, TierUse]:
        """The use of all groups that the members stand for, each like one of `uses`."""
        program, index = next(iter(meeting.arrived.items()))
        size = len(self._collective(program, index).ranks)
        standing = sum(len(self.programs[p].stands_for) for p in meeting.members)
        scale = max(1.0, standing / size) / len(uses)
        return {
            tier: TierUse(
                max(use[tier].rank_bytes for use in uses),
                max(use[tier].rank_messages for use in uses),
                scale * sum(use[tier].total_bytes for use in uses),
                scale * sum(use[tier].total_messages for use in uses),
            )
            for tier in ("link", "nic")
        }


def _numbered(program: Program) -> dict[int, int]:
    """Operator index -> how many collectives the program launched on the same group before."""
    counts: dict[str, int] = defaultdict(int)
    numbers = {}
    for op in program.ops:
        if op.collective is not None:
            numbers[op.index] = counts[op.collective.group]
            counts[op.collective.group] += 1
    return numbers


def _closure(start: int, group: str, direct: Mapping[tuple[int, str], set[int]]) -> frozenset[int]:
    """Everyone reachable from `start` over shared groups, in either direction."""
    found, todo = {start}, [start]
    while todo:
        program = todo.pop()
        near = direct.get((program, group), set()) | {p for (p, g), m in direct.items() if g == group and program in m}
        todo.extend(near - found)
        found |= near
    return frozenset(found)
