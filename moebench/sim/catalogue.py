"""What replays of the same programs on any machine have in common, worked out once.

Many operators of a step, and of the steps of other ranks, cost the same: they are priced once. Programs that take one
course, the same kinds of operators with the same waits, are run together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moebench.program import COMPUTE, TRANSFERS, Op, Program
from moebench.sim.cost import Issue, has_device_work, issue_of

Key = tuple[str, str]  # (region, phase)


@dataclass(frozen=True)
class Course:
    """Programs that differ in nothing but what their operators cost.

    Attributes:
        members: numbers of the programs.
        ops: of the first of them.
        device_of, issue_of: [programs, ops] costs of their operators, as the catalogue lists them.
        is_one, has_one_issue: [ops] whether an operator's is the same in all programs.
        marks: operators of the compute stream whose end a transfer waits for.
    """

    members: tuple[int, ...]
    ops: Sequence[Op]
    device_of: np.ndarray
    issue_of: np.ndarray
    is_one: Sequence[bool]
    has_one_issue: Sequence[bool]
    marks: frozenset[int] = frozenset()


class Catalogue:
    """Programs, one a distinct rank, with the distinct costs of their operators.

    Attributes:
        ops: of which each has its own device time; issues: likewise of host times.
        device_of, issue_of: [ops] of each program, which of them an operator has.
        parts, transfers: of each program, operators of the compute stream by region and phase, transfers by stream.

    Raises:
        ValueError: no program, or operators out of order.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        if not programs:
            raise ValueError("nothing to replay: no program")
        for program in programs:
            if any(op.index != i for i, op in enumerate(program.ops)):
                raise ValueError(f"program of rank {program.rank}: operator indices must count from 0 in order")
        self.programs = programs
        self.ops: list[Op] = []
        devices: dict[tuple, int] = {}
        issues: dict[Issue, int] = {}
        self.device_of, self.issue_of = [], []
        for program in programs:
            device_of, own_issues = [], []
            for op in program.ops:
                key = (op.kind, op.dtype, op.flops, op.bytes, op.products, op.launches, op.tiles, op.collective is None)
                place = devices.setdefault(key, len(devices))
                if place == len(self.ops):
                    self.ops.append(op)
                device_of.append(place)
                own_issues.append(issues.setdefault(issue_of(op), len(issues)))
            self.device_of.append(np.array(device_of, dtype=np.intp))
            self.issue_of.append(np.array(own_issues, dtype=np.intp))
        self.issues = list(issues)
        self.parts = [_parts(program.ops) for program in programs]
        self.transfers = [_transfers(program.ops) for program in programs]
        self.courses = self._courses()

    def _courses(self) -> list[Course]:
        if len(self.programs) == 1:
            return [self.course([0])]
        found: dict[tuple, list[int]] = {}
        for number, program in enumerate(self.programs):
            found.setdefault(_course_of(program), []).append(number)
        return [self.course(members) for members in found.values()]

    def course(self, members: Sequence[int]) -> Course:
        """Some programs as one."""
        device_of, issue_of = (np.stack([of[p] for p in members]) for of in (self.device_of, self.issue_of))
        same, same_issue = ((of == of[0]).all(axis=0).tolist() for of in (device_of, issue_of))
        ops = self.programs[members[0]].ops
        moves = [ops[i] for found in self.transfers[members[0]].values() for i in found]
        marks = frozenset(place for op in moves for place in op.waits_on if ops[place].stream == COMPUTE)
        return Course(tuple(members), ops, device_of, issue_of, same, same_issue, marks)


def _course_of(program: Program) -> tuple:
    return tuple(
        (op.kind, op.stream, op.region, op.phase, op.waits_on, op.collective is None, has_device_work(op))
        for op in program.ops
    )


def _parts(ops: Sequence[Op]) -> dict[Key, list[int]]:
    """The compute stream's operators by region and phase."""
    groups: dict[Key, list[int]] = {}
    for i, op in enumerate(ops):
        if op.stream == COMPUTE:
            groups.setdefault((op.region, op.phase), []).append(i)
    return groups


def _transfers(ops: Sequence[Op]) -> dict[str, list[int]]:
    """The transfers by stream."""
    streams: dict[str, list[int]] = {}
    for i in [i for i, op in enumerate(ops) if op.kind in TRANSFERS]:
        streams.setdefault(ops[i].stream, []).append(i)
    return streams
