"""The options of a rule: each rule's file has a frozen dataclass of them; here they are read from a GateSpec.

A label such as `sam-2+groups=4` names those that differ from their default.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from moebench.workloads.errors import InputError, one_of
from moebench.workloads.layer import GateSpec, OptionValue

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}


@dataclass(frozen=True)
class NoOptions:
    """The options of a rule that has none."""


Options = TypeVar("Options")


def read(options: type[Options], gate: GateSpec) -> Options:
    """The options of a gate, checked.

    Raises:
        InputError: an option that the rule does not have, of another type, or with a value that it refuses.
    """
    return _built(options, gate.name, dict(gate.options))


def canonical(options: type, gate: GateSpec) -> GateSpec:
    """The same gate without the options that are at their default, so that equal gates have equal labels.

    Raises:
        InputError: as `read`.
    """
    own: Any = read(options, gate)
    changed = [f.name for f in _fields(options) if getattr(own, f.name) != f.default]
    return GateSpec(gate.name, gate.top_k, tuple((name, getattr(own, name)) for name in changed))


def parse(options: type, gate: str, pairs: Iterable[tuple[str, str]]) -> dict[str, OptionValue]:
    """The values of options that are written as text, `groups` -> `"4"`.

    Raises:
        InputError: as `read`, or an option that is named twice.
    """
    types, found = types_of(options), {}
    for name, text in pairs:
        if name not in types:
            raise _unknown(gate, name, types)
        if name in found:
            raise InputError(f"gate {gate}: option {name} is named twice")
        found[name] = _value(gate, name, text, types[name])
    _built(options, gate, found)
    return found


def types_of(options: type) -> dict[str, type]:
    """Name -> type of every option."""
    return {f.name: type(f.default) for f in _fields(options)}


def at_least(name: str, value: float, least: float) -> None:
    """Refuse a value below `least`.

    Raises:
        InputError: it is below.
    """
    if value < least:
        raise InputError(f"{name} = {value}: must be at least {least}")


def _fields(options: type) -> tuple[Any, ...]:
    return fields(options)  # type: ignore[arg-type]  # every `options` is a dataclass


def _built(options: type[Options], gate: str, values: Mapping[str, OptionValue]) -> Options:
    types = types_of(options)
    for name, value in values.items():
        if name not in types:
            raise _unknown(gate, name, types)
        given = type(value)
        if given is not types[name] and (given, types[name]) != (int, float):
            raise InputError(f"gate {gate}: option {name} is {_WORDS[types[name]]}, not {value!r}")
    try:
        return options(**{name: types[name](value) for name, value in values.items()})
    except InputError as error:
        raise InputError(f"gate {gate}: option {error}") from None


def _value(gate: str, name: str, text: str, kind: type) -> OptionValue:
    try:
        return {"true": True, "false": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise InputError(f"gate {gate}: option {name} is {_WORDS[kind]}, not {text!r}") from None


def _unknown(gate: str, name: str, types: Mapping[str, type]) -> InputError:
    return one_of(f"option of gate {gate}", name, types)
