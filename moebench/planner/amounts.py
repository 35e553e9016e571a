"""What a stage costs, by kinds of amounts, and how they grow with its layers.

A stage of a few layers is traced as it is, a longer one carried on from two of these: of one and two layers what a
micro-batch costs, of two and three the ends of a step, where more happens beside each other.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

FEW, FEW_AT_ENDS = 2, 3
Amounts = TypeVar("Amounts", "Held", "Steady", "Pair", "Closing")


@dataclass(frozen=True)
class Held:
    """Bytes that a rank has all the time."""

    parameters: Any
    gradients: Any
    states: Any


@dataclass(frozen=True)
class Steady:
    """A micro-batch through a stage: seconds [N] over the draws, and bytes.

    Attributes:
        compute_s: of both, in which the compute stream runs operators and does not wait.
    """

    forward_s: Any
    backward_s: Any
    compute_s: Any
    kept_bytes: Any
    transient_bytes: Any
    output_bytes: Any


@dataclass(frozen=True)
class Pair:
    """The forward of a stage beside the backward of another."""

    time_s: Any
    transient_bytes: Any


@dataclass(frozen=True)
class Closing:
    """The ends of a step: its first forward, its last backward with all that follows."""

    opening_s: Any
    closing_s: Any
    transient_bytes: Any


def carried_on(at: Callable[[int], Amounts], layers: int, few: int = FEW) -> Amounts:
    """What `at` says of a stage of many layers, from what it says of `few` and of one fewer."""
    if layers <= few:
        return at(layers)
    less, more = at(few - 1), at(few)
    found = {}
    for field in fields(more):
        last = getattr(more, field.name)
        found[field.name] = last + (layers - few) * (last - getattr(less, field.name))
    return replace(more, **found)
