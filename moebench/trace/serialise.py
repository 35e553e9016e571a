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

SCHEMA_VERSION = 3


def programs_to_json(programs: Iterable[Program]) -> str:
    """The text for `programs_from_json`."""
    words: dict[str, int] = {}  # each distinct value and its number, in order of first use
    shapes: dict[tuple[int, ...], int] = {}
    products: dict[Product, int] = {}
    collectives: dict[Collective, int] = {}
    known: dict[tuple, list[Any]] = {}

    def middle(op: Op) -> list[Any]:
        """What many operators have in common: all but the first and the last two entries of a row."""
        names = (op.name, op.kind, op.stream, op.region, op.phase, op.dtype)
        return [
            *[words.setdefault(name, len(words)) for name in names],
            [shapes.setdefault(shape, len(shapes)) for shape in op.shapes],
            op.flops,
            op.bytes_read,
            op.bytes_written,
            op.launches,
            op.tiles,
            [products.setdefault(product, len(products)) for product in op.products],
        ]

    def row(op: Op) -> list[Any]:
        work = (op.flops, op.bytes_read, op.bytes_written, op.launches, op.tiles, op.products)
        key = (op.name, op.kind, op.stream, op.region, op.phase, op.dtype, op.shapes, work)
        entries = known.get(key)
        if entries is None:
            entries = known[key] = middle(op)
        exchange = None if op.collective is None else collectives.setdefault(op.collective, len(collectives))
        return [op.index, *entries, exchange, op.waits_on]

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
        "words": list(words),
        "shapes": list(shapes),
        "products": [astuple(product) for product in products],
        "collectives": [_collective_to_plain(collective) for collective in collectives],
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
    try:
        return _programs(document)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"not a recorded program: {type(error).__name__}: {error}") from error


def _programs(document: dict[str, Any]) -> tuple[Program, ...]:
    """Of a document of the known version."""
    words = document["words"]
    shapes = [tuple(shape) for shape in document["shapes"]]
    products = [Product(*values) for values in document["products"]]
    collectives = [_collective_from_plain(values) for values in document["collectives"]]

    def op(row: list[Any]) -> Op:
        index, name, kind, stream, region, phase, dtype, op_shapes, *numbers, op_products, exchange, waits_on = row
        flops, bytes_read, bytes_written, launches, tiles = numbers
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
            tiles=tiles,
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
        collective.tiles,
    ]


def _collective_from_plain(values: list[Any]) -> Collective:
    algorithm, group, ranks, per_peer, send, receive, tiles = values
    return Collective(algorithm, group, _ranks_from_plain(ranks), per_peer, tuple(send), tuple(receive), tiles)
