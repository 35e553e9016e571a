"""A replayed step as a timeline that Perfetto and chrome://tracing open: the Chrome trace event format.

A process is a rank; its threads are the host, the compute stream and one communication stream a group. Arrows go from
the host's launch of a collective to the collective, and on to the first operator that needed it; a gap in which the
compute stream waits for it is a slice of its own, so that exposed communication can be seen.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moebench.program import COMPUTE, Op, Program
from moebench.results.store import write_atomically
from moebench.sim.cost import LIMITS
from moebench.sim.rank_clock import Timeline
from moebench.sim.replay import Replay

HOST, COMPUTE_THREAD, FIRST_COMMUNICATION = 1, 2, 3
Event = dict[str, Any]


def chrome_trace(programs: Sequence[Program], replay: Replay, title: str) -> dict[str, Any]:
    """The trace document: nominal times, one process a distinct rank."""
    events: list[Event] = []
    for number, (program, timeline) in enumerate(zip(programs, replay.timelines)):
        threads = _threads(program)
        events += _names(program, threads)
        events += _slices(program, timeline, threads)
        events += _arrows(program, timeline, threads, number)
    events += _meetings(programs, replay)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"case": title, "step_ms": float(replay.step_time_s[0]) * 1e3, "clock": "simulated"},
    }


def write_trace(document: dict[str, Any], path: Path) -> None:
    """Write the document to a file, compressed where its name ends with .gz (Perfetto opens both)."""
    data = trace_text(document).encode()
    write_atomically(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def trace_text(document: dict[str, Any]) -> str:
    """The document as JSON."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _threads(program: Program) -> dict[str, int]:
    """Thread of each stream: `host`, `compute`, and the group of each collective in order of first use."""
    threads = {"host": HOST, COMPUTE: COMPUTE_THREAD}
    for op in program.ops:
        threads.setdefault(_stream(op), len(threads) + 1)
    return threads


def _stream(op: Op) -> str:
    if op.collective is not None:
        return f"communication ({op.collective.group})"
    return op.stream


def _names(program: Program, threads: dict[str, int]) -> Iterator[Event]:
    """Metadata: what the viewer calls the rank and its streams."""
    ranks = len(program.stands_for)
    name = f"rank {program.rank}" + (f" (and {ranks - 1} like it)" if ranks > 1 else "")
    yield {"ph": "M", "pid": program.rank, "tid": 0, "name": "process_name", "args": {"name": name}}
    for stream, thread in threads.items():
        at = {"ph": "M", "pid": program.rank, "tid": thread}
        yield {**at, "name": "thread_name", "args": {"name": stream}}
        yield {**at, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _slices(program: Program, timeline: Timeline, threads: dict[str, int]) -> Iterator[Event]:
    """What each thread does when; nothing of no length."""
    for op in program.ops:
        i = op.index
        yield from _slice(op, program.rank, HOST, timeline.host_start_s[i], timeline.host_end_s[i], {})
        args = _arguments(op, LIMITS[timeline.limits[i]])
        thread = threads[_stream(op)]
        yield from _slice(op, program.rank, thread, timeline.start_s[i], timeline.end_s[i], args)
        gap_s = timeline.exposed_s[i]
        if gap_s > 0:
            waiting = {"ms": gap_s * 1e3, "operator": i}
            end_s = timeline.end_s[i]
            for event in _slice(op, program.rank, COMPUTE_THREAD, end_s - gap_s, end_s, waiting):
                yield {**event, "name": f"waiting for {op.name}", "cat": "exposed"}


def _slice(op: Op, pid: int, tid: int, start_s: float, end_s: float, args: dict[str, Any]) -> Iterator[Event]:
    if end_s > start_s:
        yield {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "ts": start_s * 1e6,
            "dur": (end_s - start_s) * 1e6,
            "name": op.name,
            "cat": f"{op.region},{op.phase}",
            "args": args,
        }


def _arguments(op: Op, limit: str) -> dict[str, Any]:
    args: dict[str, Any] = {
        "operator": op.index,
        "region": op.region,
        "phase": op.phase,
        "kind": op.kind,
        "dtype": op.dtype,
        "shapes": " ".join(str(list(shape)) for shape in op.shapes),
    }
    if op.flops:
        args["flops"] = op.flops
    if op.bytes and op.collective is None:
        args["device_bytes"] = op.bytes
    if op.collective is not None:
        args["ranks"] = len(op.collective.ranks)
        if op.collective.bytes_per_peer is None:
            args["sent_bytes"] = sum(op.collective.send_bytes)
        else:
            args["bytes_per_peer"] = op.collective.bytes_per_peer
    elif limit != "none":
        args["bound by"] = limit
    return args


def _arrows(program: Program, timeline: Timeline, threads: dict[str, int], number: int) -> Iterator[Event]:
    """Launch on the host -> collective -> first operator on the compute stream after its wait."""
    users = _first_users(program, timeline)
    for op in program.ops:
        if op.collective is None or timeline.end_s[op.index] <= timeline.start_s[op.index]:
            continue
        flow = {"cat": "collective", "name": op.name, "id": f"{number}.{op.index}", "pid": program.rank}
        yield {**flow, "ph": "s", "tid": HOST, "ts": timeline.host_start_s[op.index] * 1e6}
        end = "t" if op.index in users else "f"
        yield {**flow, "ph": end, "bp": "e", "tid": threads[_stream(op)], "ts": timeline.start_s[op.index] * 1e6}
        if op.index in users:
            at_s = timeline.start_s[users[op.index]]
            yield {**flow, "ph": "f", "bp": "e", "tid": COMPUTE_THREAD, "ts": at_s * 1e6}


def _first_users(program: Program, timeline: Timeline) -> dict[int, int]:
    """Collective -> the first operator with device work that its wait lets run."""
    users: dict[int, int] = {}
    following = None
    for op in reversed(program.ops):
        if op.stream == COMPUTE and timeline.end_s[op.index] > timeline.start_s[op.index]:
            following = op.index
        if following is not None:
            users.update(dict.fromkeys(op.waits_on, following))
    return users


def _meetings(programs: Sequence[Program], replay: Replay) -> Iterator[Event]:
    """From the first rank's slice of a collective to the same collective on every other rank."""
    launched: dict[tuple[str, float, float], tuple[int, int]] = {}
    number = 0
    for program, timeline in zip(programs, replay.timelines):
        threads = _threads(program)
        for op in program.ops:
            start, end = float(timeline.start_s[op.index]), float(timeline.end_s[op.index])
            if op.collective is None or end <= start:
                continue
            here = (program.rank, threads[_stream(op)])
            pid, tid = launched.setdefault((op.collective.group, start, end), here)
            if (pid, tid) == here:
                continue
            flow = {"cat": "meeting", "name": op.name, "id": f"meeting.{number}", "ts": start * 1e6}
            number += 1
            yield {**flow, "ph": "s", "pid": pid, "tid": tid}
            yield {**flow, "ph": "f", "bp": "e", "pid": here[0], "tid": here[1]}
