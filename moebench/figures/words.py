"""What stands on the axes of a printed figure."""

import re

from moebench.figures.points import Grid
from moebench.workloads.figure import BEST_OTHER, QUANTITIES, REDUCTION, SPEEDUP, SYSTEM
from moebench.workloads.figure_lists import called

LABELS = {
    "batch_size": "sequences a GPU",
    "size": "nodes x GPUs",
    "payload": "payload of a GPU, bytes",
    "gate": "gate",
    "model": "model",
    "cluster": "cluster",
    "tokens": "tokens",
    "top_k": "choices a token",
    "experts": "experts",
    "d_model": "model width",
    "d_ffn": "feed-forward width",
    "op": "operator",
    "dtype": "dtype",
    "direction": "direction",
    "variant": "variant",
    "part": "part",
    "attention_mb": "attention's parameters, MB a GPU",
    "expert_mb": "experts' parameters, MB a GPU",
    "parameters": "parameters",
    "products": "products",
    "steps": "steps",
}
SYSTEMS = {
    "layer": "system", "exchange": "exchange", "kernel": "implementation", "model": "system", "part": "way",
    "job": "system",
}
MOST_LETTERS = 28  # of a baseline beside an axis
_SHORT = re.compile(r" ([KMGT]?)i?B$")  # 16 MiB as 16M
_TITLES = {"batch_size": "batch size {}", "top_k": "k = {}", "tokens": "{} tokens", "experts": "{} experts"}


def axis_label(name: str, kind: str) -> str:
    """Of the x axis."""
    return SYSTEMS[kind] if name == SYSTEM else LABELS[name]


def value_label(grid: Grid) -> str:
    """Of the y axis, with the unit."""
    figure = grid.figure
    if figure.value == SPEEDUP:
        return f"speedup over {'the best other' if figure.baseline == BEST_OTHER else _baseline(grid)}"
    if figure.value == REDUCTION:
        return f"reduction against {figure.baseline}, %"
    what = QUANTITIES[grid.metric][0]
    return f"{what}, {grid.unit}" if grid.unit else what


def _baseline(grid: Grid) -> str:
    """The baseline, or the paper's word for it; a long name stands in the title only."""
    words = called(grid.experiment, grid.figure.baseline) if grid.experiment is not None else ()
    names = [name for name in (*words, grid.figure.baseline) if len(name) <= MOST_LETTERS]
    return names[0] if names else "the baseline"


def series_text(grid: Grid, name: str) -> str:
    """Of a series in the legend; of a system with a long name the paper's word, where it has one."""
    is_long = grid.figure.series == SYSTEM and len(name) > MOST_LETTERS and grid.experiment is not None
    words = called(grid.experiment, name) if is_long and grid.experiment is not None else ()
    return words[0] if words else tick_text(grid.figure.series, name, grid.kind)


def panel_title(name: str, value: str) -> str:
    """Over a panel: `batch size 32`, `k = 2`, `switch`."""
    return _TITLES.get(name, "{}").format(number_text(name, value))


def tick_text(name: str, value: str, kind: str = "") -> str:
    """Under a place of the axis, and with `kind` in a legend."""
    if name == "payload":
        return value if kind else _SHORT.sub(r"\1", value)
    text = number_text(name, value)
    return f"{text} {LABELS[name]}" if kind and name in ("tokens", "top_k", "experts") else text


def number_text(name: str, value: str) -> str:
    """`32k` for 32768 tokens."""
    if name == "tokens" and value.isdigit() and int(value) >= 1024 and int(value) % 1024 == 0:
        return f"{int(value) // 1024}k"
    return value
