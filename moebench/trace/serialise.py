"""Programs as compact JSON and back, exactly: what a run folder's traces/ holds.

Operators repeat names, shapes, products and collectives, so each distinct one is written once and referred to by
number.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import Any

from moebench.kernels.cost import Product
from moebench.program import Collective, Op, Program
from moebench.workloads.errors import InputError

SCHEMA_VERSION = 2


class _Table:
    """Distinct values in order of first use."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[Any, int] = {}

    def place(self, value: Any) -> int:
        place = self._places.setdefault(value, len(self.values))
        if place == len(self.values):
            self.values.append(value)
        return place


def programs_to_json(programs: Iterable[Program]) -> str:
    """The text for `programs_from_json`."""
    words, shapes, products, collectives = _Table(), _Table(), _Table(), _Table()

    def row(op: Op) -> list[Any]:
        names = (op.name, op.kind, op.stream, op.region, op.phase, op.dtype)
        return [
            op.index,
            *map(words.place, names),
            [shapes.place(shape) for shape in op.shapes],
            op.flops,
            op.bytes_read,
            op.bytes_written,
            op.launches,
            [products.place(product) for product in op.products],
            None if op.collective is None else collectives.place(op.collective),
            op.waits_on,
        ]

    entries = [
        {
            "rank": program.rank,
            "world": program.world,
            "stands_for": _ranks_to_plain(program.stands_for),
            "persistent_bytes": program.persistent_bytes,
            "peak_bytes": program.peak_bytes,
            "notes": program.notes,
            "ops": [row(op) for op in program.ops],
        }
        for program in programs
    ]
    document = {
        "schema_version": SCHEMA_VERSION,
        "words": words.values,
        "shapes": shapes.values,
        "products": [astuple(product) for product in products.values],
        "collectives": [_collective_to_plain(collective) for collective in collectives.values],
        "programs": entries,
    }
    return json.dumps(document, separators=(",", ":"))


def programs_from_json(text: str) -> tuple[Program, ...]:
    """The programs that `programs_to_json` wrote.

    Raises:
        InputError: not such a text, or of another schema version.
    """
    try:
        document = json.loads(text)
        version = document["schema_version"]
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise InputError(f"not a recorded program: {error}") from error
    if version != SCHEMA_VERSION:
        raise InputError(f"recorded program of schema version {version}; this moebench reads version {SCHEMA_VERSION}")
    words = document["words"]
    shapes = [tuple(shape) for shape in document["shapes"]]
    products = [Product(*values) for values in document["products"]]
    collectives = [_collective_from_plain(values) for values in document["collectives"]]

    def op(row: list[Any]) -> Op:
        index, name, kind, stream, region, phase, dtype, op_shapes, *numbers, op_products, exchange, waits_on = row
        flops, bytes_read, bytes_written, launches = numbers
        return Op(
            index=index,
            name=words[name],
            kind=words[kind],
            stream=words[stream],
            region=words[region],
            phase=words[phase],
            shapes=tuple(shapes[place] for place in op_shapes),
            dtype=words[dtype],
            flops=flops,
            bytes_read=bytes_read,
            bytes_written=bytes_written,
            products=tuple(products[place] for place in op_products),
            collective=None if exchange is None else collectives[exchange],
            waits_on=tuple(waits_on),
            launches=launches,
        )

    return tuple(
        Program(
            ops=tuple(op(row) for row in entry["ops"]),
            rank=entry["rank"],
            world=entry["world"],
            stands_for=_ranks_from_plain(entry["stands_for"]),
            persistent_bytes=entry["persistent_bytes"],
            peak_bytes=entry["peak_bytes"],
            notes=tuple(entry["notes"]),
        )
        for entry in document["programs"]
    )


def _ranks_to_plain(ranks: Sequence[int]) -> dict[str, int] | list[int]:
    """A range stays one, so that 1,440 ranks cost no more than 8."""
    if isinstance(ranks, range):
        return {"start": ranks.start, "stop": ranks.stop, "step": ranks.step}
    return list(ranks)


def _ranks_from_plain(plain: dict[str, int] | list[int]) -> Sequence[int]:
    return range(plain["start"], plain["stop"], plain["step"]) if isinstance(plain, dict) else tuple(plain)


def _collective_to_plain(collective: Collective) -> list[Any]:
    return [
        collective.algorithm,
        collective.group,
        _ranks_to_plain(collective.ranks),
        collective.bytes_per_peer,
        collective.send_bytes,
        collective.receive_bytes,
    ]


def _collective_from_plain(values: list[Any]) -> Collective:
    algorithm, group, ranks, per_peer, send, receive = values
    return Collective(algorithm, group, _ranks_from_plain(ranks), per_peer, tuple(send), tuple(receive))
