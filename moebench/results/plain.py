"""Frozen dataclasses to JSON values and back, by their type annotations.

Apart from the store because the suite, the filters and the machines of a run all pass through it.
"""

import types
from collections.abc import Mapping, Sequence
from collections.abc import Mapping as AbstractMapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, any depth; other values as they are."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | range):
        return [to_plain(v) for v in value]
    return value


def from_plain(kind: type[T], data: Any) -> T:
    """The value of type `kind` that `to_plain` turned into `data`.

    Raises:
        ValueError: a key is missing, unknown, or of the wrong type; the text says which.
    """
    return _build(kind, data, kind.__name__)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _build(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        return _build(_alternative([a for a in arguments if a is not type(None)], data, where), data, where)
    if origin is tuple:
        _expect(isinstance(data, list | tuple), where, "a list", data)
        if arguments[-1] is not Ellipsis:  # a type for each place
            _expect(len(data) == len(arguments), where, f"{len(arguments)} values", data)
            return tuple(_build(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(arguments, data)))
        return tuple(_build(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(data))
    if origin in (dict, Mapping, AbstractMapping):
        _expect(isinstance(data, Mapping), where, "an object", data)
        return {k: _build(arguments[1], v, f"{where}.{k}") for k, v in data.items()}
    if origin in (Sequence, list):
        return [_build(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(data)]
    if is_dataclass(kind):
        return _build_dataclass(kind, data, where)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(kind, type) and kind is not object:
        _expect(isinstance(data, kind) and not (kind is int and isinstance(data, bool)), where, kind.__name__, data)
    return data


def _alternative(kinds: Sequence[Any], data: Any, where: str) -> Any:
    """Of several dataclasses the one whose field `kind` is what the data say there; the first where they say nothing.

    Of several plain types that of the data.
    """
    known = {f.default: kind for kind in kinds if is_dataclass(kind) for f in fields(kind) if f.name == "kind"}
    said = data.get("kind") if known and isinstance(data, Mapping) else None
    if said is None:
        return type(data) if type(data) in kinds else kinds[0]
    _expect(isinstance(said, str) and said in known, f"{where}.kind", f"one of {', '.join(map(str, known))}", said)
    return known[said]


def _build_dataclass(kind: Any, data: Any, where: str) -> Any:
    _expect(isinstance(data, Mapping), where, "an object", data)
    known = {f.name for f in fields(kind) if f.init}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}")
    missing = [f.name for f in fields(kind) if f.init and f.name not in data and _is_needed(f)]
    if missing:
        raise ValueError(f"{where}: missing key {missing[0]!r}")
    hints = _hints(kind)
    return kind(**{name: _build(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _is_needed(field: Field) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _expect(right: bool, where: str, what: str, data: Any) -> None:
    if not right:
        raise ValueError(f"{where}: expected {what}, found {data!r}")
