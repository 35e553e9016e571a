"""What a system planned for a model's step: its two timelines as text, before and after, and what went where.

A row is a stream, a column as long as every other of both timelines; its shade says for what share the stream is busy.
"""

import textwrap
from collections.abc import Callable, Sequence

import numpy as np

from moebench.cases.case import Case
from moebench.systems.planning import Instructions, Timeline
from moebench.workloads.machine import Topology

SHADES = " ░▒▓█"
STREAMS = (("compute", ("compute",)), ("all-to-all", ("all_to_all", "sizes")), ("all-reduce", ("all_reduce",)))
LABEL = max(len(name) for name, _ in STREAMS) + 2
LEAST, MOST = 24, 160  # columns of a timeline


def lines(
    case: Case, topology: Topology, width: int, tell: Callable[[str], None] = lambda line: None
) -> list[str]:
    """The lines for a terminal of so many columns; none where the system plans nothing.

    The plan is made anew, as the run made it.

    Args:
        tell: called with a line for each stage of planning, as it begins.
    """
    from moebench.trace.model import telling, traced

    with telling(tell):
        planned = traced(case, topology).planned
    if planned is None:
        return []
    whole_s = max(planned.before.makespan_s, planned.after.makespan_s)
    columns = max(LEAST, min(width - LABEL, MOST))
    found = [f"The plan of {case.system}, by its own cost model; a column is {1e3 * whole_s / columns:.2f} ms:"]
    for title, timeline, program in zip(
        ("before", "after"), (planned.before, planned.after), planned.programs, strict=True
    ):
        found.append(
            f"{title}: {1e3 * timeline.makespan_s:.1f} ms, of which {1e3 * timeline.exposed_s:.1f} ms communicate "
            "while nothing is computed"
        )
        found.extend(timeline_rows(program, timeline, whole_s, columns))
    found.append("")
    for told in planned.told:
        found.extend(textwrap.wrap(told, max(width, LEAST + LABEL), subsequent_indent="    "))
    return found


def timeline_rows(program: Instructions, timeline: Timeline, whole_s: float, columns: int) -> list[str]:
    """A row for each stream that does anything."""
    found = []
    for name, kinds in STREAMS:
        own = [number for number, one in enumerate(program) if one.kind in kinds and one.time_s > 0]
        if own:
            spans = [(timeline.start_s[number], timeline.end_s[number]) for number in own]
            found.append(f"{name:<{LABEL}}{_shaded(spans, whole_s, columns)}".rstrip())
    return found


def _shaded(spans: Sequence[tuple[float, float]], whole_s: float, columns: int) -> str:
    busy = np.zeros(columns)
    edges = np.linspace(0, whole_s, columns + 1)
    for start_s, end_s in spans:
        places = np.searchsorted(edges, (start_s, end_s), "right") - 1
        first, last = (int(place) for place in np.clip(places, 0, columns - 1))
        for at in range(first, last + 1):
            busy[at] += max(0.0, min(end_s, edges[at + 1]) - max(start_s, edges[at]))
    shares = np.clip(busy / (whole_s / columns), 0, 1)
    return "".join(SHADES[round(share * (len(SHADES) - 1))] for share in shares)
