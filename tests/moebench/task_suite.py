"""A small suite of steps of several tasks for tests, with the names of a paper's claims, and rows of it."""

from moebench.cases.plan import Filters, plan
from moebench.results.rows import row_of, without_number

TEXT = """
schema_version = 1
title = "Tasks"
paper = "none"
reported = "moesys"
samples = 3

[[experiments]]
kind = "part"
name = "elastic"
title = "Elastic"
question = "Who waits?"
metric = "throughput_per_gpu"
sizes = ["1x4", "1x8"]
node_types = ["a100-80"]
parts = [
    { part = "task-step", systems = ["moesys", "moesys+rows=stay", "ddp"], batches = [[512, 256, 128, 128]], sizes = { positions = [4], recomputed = [0], heads = [2], layers = [1] } },
]
readings = [{ name = "small", sizes = { d_model = 8 } }, { name = "wide", sizes = { d_model = 16 }, dtype = "fp32" }]

[[experiments]]
kind = "part"
name = "ufo"
title = "UFO"
question = "Who is faster?"
metric = "throughput_per_gpu"
sizes = ["4x8"]
node_types = ["a100-80"]
parts = [
    { part = "task-step", systems = ["moesys", "ddp", "ddp+by=task"], sizes = { d_model = [8], positions = [4], recomputed = [0], heads = [2], layers = [1] } },
]
readings = [{ name = "four", batches = [64, 32, 32] }]

[[experiments]]
kind = "part"
name = "ufo-run"
title = "UFO's run"
question = "How long?"
metric = "throughput_per_gpu"
sizes = ["6x8"]
node_types = ["a100-80"]
parts = [
    { part = "task-step", systems = ["moesys"], batches = [[480]], sizes = { d_model = [24400], positions = [4], recomputed = [0], heads = [2], layers = [1] } },
]
"""  # noqa: E501

SECONDS = {"1x4": 4.0, "1x8": 1.6, "4x8": 2.0, "6x8": 11.52}
FACTOR = {"moesys": 1.0, "moesys+rows=stay": 0.5, "ddp": 1.5, "ddp+by=task": 3.0}
BYTES = {"moesys": 40e9, "moesys+rows=stay": 30e9, "ddp": 50e9, "ddp+by=task": 60e9}


def written(folder, text=TEXT):
    """The path of the suite in a folder."""
    path = folder / "tasks.toml"
    path.write_text(text)
    return str(path)


def rows_of(suite, lacking=(), out=()):
    """Rows of every case: time by place and system, four draws, memory by system."""
    rows = []
    for case in plan(suite, Filters()):
        if case.system in lacking:
            rows.append(without_number(case, "a100-80", "unsupported", "because"))
            continue
        seconds = SECONDS[case.size] * FACTOR[case.system] * (2 if case.workload.dtype == "fp32" else 1)
        drawn = tuple(seconds * scale for scale in (1.0, 0.9, 1.1, 1.2))
        if case.system in out:
            rows.append(row_of(case, "a100-80", "part_time", "s", None, status="out-of-memory", reason="large",
                               draws=(float("nan"),) * 4))  # fmt: skip
        else:
            rows.append(row_of(case, "a100-80", "part_time", "s", seconds, draws=drawn, low=drawn[1], high=drawn[3]))
            rate = sum(case.workload.batches) / {"1x4": 4, "1x8": 8, "4x8": 32, "6x8": 48}[case.size] / seconds
            rows.append(row_of(case, "a100-80", "throughput_per_gpu", "1/s", rate, low=rate / 1.2, high=rate / 0.9))
            detail = {"ranks": [0, 1, 2], "reads": [[0, 128]], "works": [[0, 100], [1, 28]], "holds": [0, 1],
                      "waits": seconds / 4}  # fmt: skip
            rows.append(row_of(case, "a100-80", "rank_time", "s", 3 * seconds / 4, detail=detail))
        rows.append(row_of(case, "a100-80", "peak_memory", "B", BYTES[case.system]))
    return rows
