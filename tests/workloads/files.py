"""Small complete files that tests write and then break, and the writer that round trips use."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HARDWARE: dict[str, str] = {
    "gpu.memory.capacity": 'value = "24 GiB", status = "datasheet"',
    "gpu.memory.reserved": 'value = "1 GiB", low = "0.5 GiB", high = "2 GiB", status = "assumed"',
    "gpu.memory.bandwidth": 'value = "672 GB/s", status = "datasheet"',
    "gpu.peak.fp32": 'value = "16.3 TFLOP/s", status = "datasheet"',
    "gpu.product.compute_share": 'value = 0.75, low = 0.6, high = 0.9, status = "derived"',
    "gpu.product.bandwidth_share": 'value = 0.75, low = 0.6, high = 0.9, status = "derived"',
    "gpu.product.fixed": 'value = "6 us", low = "5 us", high = "10 us", status = "derived"',
    "gpu.kernel.fixed": 'value = "3 us", low = "2 us", high = "5 us", status = "assumed"',
    "host.issue.operator": 'value = "7 us", low = "5 us", high = "10 us", status = "assumed"',
    "host.issue.view": 'value = "2 us", low = "1 us", high = "4 us", status = "assumed"',
    "host.issue.custom": 'value = "15 us", low = "7 us", high = "40 us", status = "assumed"',
    "host.issue.collective": 'value = "30 us", low = "15 us", high = "60 us", status = "assumed"',
    "host.sync": 'value = "15 us", low = "10 us", high = "20 us", status = "assumed"',
}

LINKS: dict[str, str] = {
    "link.bandwidth": 'value = "4 GB/s", low = "2 GB/s", high = "9 GB/s", status = "assumed"',
    "link.latency": 'value = "4 us", low = "2 us", high = "7 us", status = "assumed"',
    "link.message": 'value = "1 us", low = "0.5 us", high = "2 us", status = "assumed"',
    "nic.bandwidth": 'value = "100 Gb/s", low = "80 Gb/s", high = "100 Gb/s", status = "assumed"',
    "nic.latency": 'value = "14 us", low = "4 us", high = "30 us", status = "assumed"',
    "nic.message": 'value = "5 us", low = "1 us", high = "31 us", status = "assumed"',
    "fabric.share": 'value = 0.8, low = 0.3, high = 1.0, status = "assumed"',
    "collective.fixed": 'value = "8 us", low = "6 us", high = "15 us", status = "assumed"',
}

CURVES = """
[curves.memory]
at = ["1 MB", "16 MB"]
share = [0.5, 0.85]
status = "assumed"
source = "test"
"""

LAYER = """
[experiments.layer]
d_model = 64
d_ffn = 64
sequence = 16
experts = ["max(4, world)"]
"""

EXPERIMENT = """
[[experiments]]
name = "tiny"
title = "A tiny layer"
question = "Does it load?"
metric = "step_time"
systems = ["reference"]
gates = ["switch", "topk-2"]
batch_sizes = [1]
sizes = ["1x2"]
node_types = ["titan-rtx"]
"""

SUITE_HEAD = 'schema_version = 1\ntitle = "Test"\npaper = "none"\n'


def hardware_text(changed: Mapping[str, str | None] | None = None, head: str = "", curves: str = CURVES) -> str:
    """A hardware file with some parameters replaced, added, or left out (None)."""
    head = head or 'schema_version = 1\ntitle = "Test GPU"\nkind = "gpu"\n'
    return head + _parameters(HARDWARE, changed) + curves


def topology_text(changed: Mapping[str, str | None] | None = None, head: str = "") -> str:
    """A topology file of 2 nodes of 4 GPUs, likewise."""
    head = head or (
        'schema_version = 1\ntitle = "Test nodes"\nhardware = "titan-rtx"\nnodes = 2\ngpus_per_node = 4\n'
        'nics_per_node = 1\nlink_kind = "pcie"\n'
    )
    return head + _parameters(LINKS, changed)


def suite_text(experiment: str = EXPERIMENT, layer: str = LAYER, head: str = SUITE_HEAD) -> str:
    """A suite of one experiment."""
    return head + experiment + layer


def _parameters(rows: Mapping[str, str], changed: Mapping[str, str | None] | None) -> str:
    merged: dict[str, str | None] = {**rows, **(changed or {})}
    lines = [f'"{name}" = {{ {row}, source = "test" }}' for name, row in merged.items() if row is not None]
    return "\n[parameters]\n" + "\n".join(lines) + "\n"


def written(folder: Path, text: str, name: str = "mine.toml") -> Path:
    """The text as a file; its folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def toml(value: Any) -> str:
    """A value as TOML: numbers, booleans, strings, lists, and tables inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{toml(key)} = {toml(item)}" for key, item in value.items()) + " }"
    return "[" + ", ".join(toml(item) for item in value) + "]"


def toml_file(data: Mapping[str, Any]) -> str:
    """A whole file, every top-level key a line."""
    return "".join(f"{key} = {toml(value)}\n" for key, value in data.items())
