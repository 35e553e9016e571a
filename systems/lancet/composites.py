"""Nodes of a graph that are no single operator: functions that a plan names as it names operators.

What they run is seen operator by operator under a recorder. Passes see one node, and what kind of work it is.
"""

from collections.abc import Callable
from typing import Any

from moebench.systems.lancet import gating, irregular

PREFIX = "lancet::"

# The collectives that they launch; all others compute.
LAUNCHES: dict[Callable[..., Any], str] = {
    irregular.start_sizes: "sizes",
    irregular.launch_dispatch: "all_to_all",
    irregular.launch_combine: "all_to_all",
}
# They wait for their first argument.
WAITS: tuple[Callable[..., Any], ...] = (irregular.read_sizes, irregular.wait_part)

_COMPUTES: tuple[Callable[..., Any], ...] = (
    gating.slots_in_part,
    irregular.part_layout,
    irregular.by_expert,
    irregular.by_source,
    irregular.merged,
)
COMPOSITES = {PREFIX + function.__name__: function for function in (*LAUNCHES, *WAITS, *_COMPUTES)}


def name_of(function: Callable[..., Any]) -> str | None:
    """`lancet::by_expert`; None of what is no composite."""
    return next((name for name, one in COMPOSITES.items() if one is function), None)
