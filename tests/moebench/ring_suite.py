"""A small suite of ways that trade memory for time, and rows of it by hand: three layers, slots for one, two or all."""

from moebench.cases.plan import Filters, plan
from moebench.results.rows import row_of
from moebench.workloads.load import load_suite

TEXT = """
schema_version = 1
title = "Ring"
paper = "none"
reported = "moesys"
samples = 3

[[experiments]]
kind = "part"
name = "ring-offload"
title = "Ring"
question = "What does it take?"
metric = "part_time"
sizes = ["2x8"]
node_types = ["a100-40"]
readings = [
    { name = "tokens", sizes = { sequences = 1, prompt = 1, generated = 4 } },
    { name = "prompts", sizes = { sequences = 8, prompt = 1024, generated = 1 } },
]
figure = { kind = "part-memory", baseline = "no-offload" }

[[experiments.parts]]
part = "generation-offloaded"
systems = [
    "no-offload", "moesys+slots=1", "moesys+slots=2", "moesys+slots=23", "moesys+slots=12+keep=10", "moesys+slots=24",
]
models = ["gpt-58b-moe"]
sizes = { top_k = [1], capacity_percent = [100] }

[[experiments]]
kind = "part"
name = "inference"
title = "Inference"
question = "How many more tokens?"
metric = "part_time"
sizes = ["1x8", "2x8"]
node_types = ["a100-40"]
parts = [{ part = "generation", systems = ["moesys", "deepspeed"], models = ["gpt-58b-moe"] }]
readings = [
    { name = "tokens", sizes = { sequences = 1, prompt = 1, generated = 4, top_k = 1, capacity_percent = 100 } },
    { name = "prompts", sizes = { sequences = 8, prompt = 1024, generated = 1, top_k = 1, capacity_percent = 100 } },
]
figure = { kind = "part-readings", baseline = "deepspeed" }
"""
# GB of a GPU, and seconds of tokens and of prompts.
HELD = {"no-offload": (20.0, 1.0, 4.0), "moesys+slots=1": (13.6, 12.0, 4.16), "moesys+slots=2": (14.0, 10.0, 4.1),
        "moesys+slots=23": (19.8, 9.9, 4.1), "moesys+slots=12+keep=10": (17.0, 2.0, 4.0),
        "moesys+slots=24": (20.0, 1.0, 4.0)}  # fmt: skip
FAST = {"moesys": (1.0, 4.0), "deepspeed": (1.1, 5.2)}


def loaded(folder):
    """The suite."""
    path = folder / "ring.toml"
    path.write_text(TEXT)
    return load_suite(str(path))


def rows_of(suite):
    """Rows of both experiments; two draws, of which the second takes 1.5 times as long with copies."""
    rows = []
    for case in plan(suite, Filters()):
        place = 0 if case.workload.size("prompt") == 1 else 1
        if case.experiment == "inference":
            seconds = FAST[case.system][place]
            rows.append(row_of(case, "a100-40", "part_time", "s", seconds, draws=(seconds, seconds, seconds)))
            continue
        held, *times = HELD[case.system]
        is_whole = held == 20.0
        draws = tuple(times[place] * scale for scale in (1.0, 1.0, 1.0 if is_whole else 1.5))
        extra = {"low": 0.9 * draws[0], "high": 1.1 * draws[0]}
        rows.append(row_of(case, "a100-40", "part_time", "s", draws[0], draws=draws, **extra))
        rows.append(row_of(case, "a100-40", "peak_memory", "B", held * 1e9))
        rows.append(row_of(case, "a100-40", "formula_time", "s", 0.98 * draws[0]))
    return rows
