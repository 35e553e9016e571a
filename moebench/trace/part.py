"""A part by itself as Programs, and what a fused kernel makes of one that is cut into tiles.

Routing is even, so that ranks differ by their place only: traced is one of them, or where whom they send to depends on
that, as in a ring, one a node. Of ranks that have unequal work, those that are alike share a program.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import torch

from moebench.cases.case import Case
from moebench.cases.parts import part_of, shape_of
from moebench.kernels.collectives.group import Group
from moebench.kernels.host import answering
from moebench.program import Op, Program
from moebench.systems.part_interface import TILE_ROWS, Setting, parsed
from moebench.systems.part_registry import make
from moebench.trace.alone import Call, in_precision, trace_by_node, trace_call
from moebench.trace.errors import Unsupported
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.errors import InputError
from moebench.workloads.machine import Topology
from moebench.workloads.model import TF32
from moebench.workloads.part import PartWorkload

Shape = tuple[int, ...]
ASSUMED = (
    "assumes a fused kernel: its tiles have no start of their own, of a kernel or of a collective, and need no copy to "
    "be cut and put together; each kernel and each collective takes in all what it takes in one piece, spread evenly "
    "over the tiles"
)


def programs_of(case: Case, topology: Topology) -> tuple[Program, ...]:
    """The programs of a case.

    Raises:
        Unsupported: the part has no meaning on so many ranks.
    """
    system = case.system
    if parsed(part_of(case).part, system)[0] != "fused":
        return _traced(case, system, topology)
    cut, whole = _traced(case, system, topology), _traced(case, "serial", topology)
    chunks = part_of(case).size("tokens") // topology.ranks // TILE_ROWS
    return tuple(as_tiles(one, other, chunks) for one, other in zip(cut, whole, strict=True))


def _traced(case: Case, system: str, topology: Topology) -> tuple[Program, ...]:
    return _programs(part_of(case), system, topology.ranks, topology.gpus_per_node)


@lru_cache(maxsize=2)  # what follows from a case's rows is worked out right after them, from the same programs
def _programs(workload: PartWorkload, system: str, ranks: int, per_node: int) -> tuple[Program, ...]:

    def call_of(group: Group) -> Call:
        dtype = torch_dtype("fp32" if workload.dtype == TF32 else workload.dtype)
        call = make(Setting(workload, system, group, torch.device("meta"), dtype, shape_of(workload)))

        def run() -> object:
            with answering(call.reads) if call.reads is not None else nullcontext():
                return call.run()

        return Call(run, call.persistent, call.alike)

    try:
        programs = trace_call(call_of, ranks, per_node)
        if len(programs) == 1 and any(map(_is_by_place, programs[0].ops)):
            programs = trace_by_node(call_of, ranks, per_node)
        return tuple(replace(one, ops=in_precision(one.ops, workload.dtype)) for one in programs)
    except (InputError, ValueError) as error:
        raise Unsupported(str(error)) from error


def _is_by_place(op: Op) -> bool:
    """Whether a rank sends more to some than to others: then other ranks send more to others."""
    return op.collective is not None and len(set(op.collective.send_bytes)) > 1


def as_tiles(cut: Program, whole: Program, chunks: int) -> Program:
    """A program in chunks, whose operators cost their share of those of the same program in one piece.

    An operator that the whole program runs once and this one once a chunk is a tile of that one. What only the cut
    needs, bringing rows into the chunks' order and together again, is left out: a fused kernel reads and writes where
    they are. So all kernels and collectives together take what they take in one piece.
    """
    left = defaultdict(list)  # operators of the whole program that have no tiles yet, by what they are
    for op in whole.ops:
        left[_what(op)].append(op)
    groups: dict[tuple, list[Op]] = defaultdict(list)
    for op in cut.ops:
        groups[*_what(op), op.shapes].append(op)
    found: dict[int, Op] = {}
    for (*what, shapes), pieces in groups.items():
        wholes = [one for one in left[tuple(what)] if _is_stretched(shapes, one.shapes, chunks)]
        if chunks > 1 and wholes and len(pieces) == chunks * len(wholes):
            left[tuple(what)] = [one for one in left[tuple(what)] if one not in wholes]
            found |= {op.index: _tile(op, wholes[place % len(wholes)], chunks) for place, op in enumerate(pieces)}
    for op in cut.ops:
        if op.index not in found and left[_what(op)]:
            left[_what(op)].pop()
            found[op.index] = op
    return replace(cut, ops=_renumbered([found[index] for index in sorted(found)]), notes=(*cut.notes, ASSUMED))


def _what(op: Op) -> tuple[str, str, str, str]:
    return op.name, op.region, op.phase, op.dtype


def _is_stretched(shapes: Sequence[Shape], whole: Sequence[Shape], chunks: int) -> bool:
    """Whether every tensor is as in the whole program, or has a dimension `chunks` times as small but for one entry."""
    return len(shapes) == len(whole) and all(
        len(own) == len(other)
        and sum(a != b for a, b in zip(own, other)) <= 1
        and all(a == b or 0 <= a * chunks - b < chunks for a, b in zip(own, other))
        for own, other in zip(shapes, whole)
    )


def _tile(op: Op, whole: Op, tiles: int) -> Op:
    collective = None if op.collective is None else replace(op.collective, tiles=tiles)
    return replace(
        op,
        flops=whole.flops // tiles,
        bytes_read=whole.bytes_read // tiles,
        bytes_written=whole.bytes_written // tiles,
        products=whole.products,
        collective=collective,
        launches=whole.launches,
        tiles=tiles,
    )


def _renumbered(ops: Sequence[Op]) -> tuple[Op, ...]:
    place = {op.index: index for index, op in enumerate(ops)}
    return tuple(
        replace(op, index=index, waits_on=tuple(place[other] for other in op.waits_on)) for index, op in enumerate(ops)
    )
