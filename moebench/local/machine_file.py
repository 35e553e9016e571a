"""What was measured, as the text of hardware and topology files; the only place that writes numbers with units."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from moebench.local.fit import Fit, FittedCurve, Range
from moebench.local.machine import last_cache_bytes, memory_bytes
from moebench.workloads.toml_file import SCHEMA_VERSION

_UNITS: Mapping[str, tuple[str, float]] = {
    "gpu.memory.capacity": ("B", 1.0),
    "gpu.memory.reserved": ("B", 1.0),
    "gpu.l2": ("B", 1.0),
    "gpu.memory.bandwidth": ("GB/s", 1e9),
    "gpu.peak": ("GFLOP/s", 1e9),
    "gpu.product.fixed": ("us", 1e-6),
    "gpu.kernel.fixed": ("us", 1e-6),
    "host.cores": ("", 1.0),
    "host.stream": ("GB/s", 1e9),
    "host": ("us", 1e-6),
    "link.bandwidth": ("GB/s", 1e9),
    "link.eager.bandwidth": ("GB/s", 1e9),
    "bridge.bandwidth": ("GB/s", 1e9),
    "nic.bandwidth": ("GB/s", 1e9),
    "nic.message_bytes": ("B", 1.0),
    "nic.payload_share": ("", 1.0),
    "fabric.share": ("", 1.0),
    "switch.buffer": ("B", 1.0),
    "link": ("us", 1e-6),
    "nic": ("us", 1e-6),
    "collective": ("us", 1e-6),
}


def hardware_text(
    found: Fit, heading: str, title: str, notes: Sequence[str], source: str, ranks: int = 1
) -> str:
    """A Hardware file of a CPU: what was fitted, and what needs no measurement; `ranks` share the memory."""
    memory = memory_bytes() // ranks
    exact = {"gpu.memory.capacity": Range(memory, memory, memory), "gpu.memory.reserved": Range(0, 0, 0)}
    exact |= {"gpu.product.fixed": Range(0, 0, 0), "gpu.kernel.fixed": Range(0, 0, 0)}
    cache = last_cache_bytes()
    if cache:
        exact["gpu.l2"] = Range(cache, cache, cache)
    shares = found.curves["product.fp32"].share[-2:]
    exact["gpu.product.compute_share"] = Range(min(shares), min(shares), max(shares))
    lines = head(heading, title, notes)
    lines.insert(3, 'kind = "cpu"')
    for name, measured in {**exact, **found.parameters}.items():
        lines += parameter(name, measured, source)
    for name, curve in found.curves.items():
        lines += _curve(name, curve, source)
    return "\n".join(lines)


def head(heading: str, title: str, notes: Sequence[str]) -> list[str]:
    """The first lines of a file."""
    listed = [f"  {json.dumps(note)}," for note in notes]
    about = [f"schema_version = {SCHEMA_VERSION}", f"title = {json.dumps(title)}"]
    return [f"# {heading}", *about, "notes = [", *listed, "]", ""]


def parameter(name: str, found: Range, source: str, status: str = "measured") -> list[str]:
    """The table of one parameter; a datasheet's has no range."""
    value, low, high = (_quantity(name, number) for number in (found.value, found.low, found.high))
    bounds = [] if status == "datasheet" else [f"low = {low}", f"high = {high}"]
    about = [f'status = "{status}"', f"source = {json.dumps(source)}", ""]
    return [f'[parameters."{name}"]', f"value = {value}", *bounds, *about]


def write_text(text: str, path: Path) -> None:
    """Write a file in one step, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".partial")
    scratch.write_text(text)
    scratch.replace(path)


def _quantity(name: str, value: float) -> str:
    """A number as the file states it; shares and counts are plain numbers."""
    known = [prefix for prefix in _UNITS if name == prefix or name.startswith(prefix + ".")]
    unit, scale = _UNITS[max(known, key=len)] if known else ("", 1.0)
    if unit == "B":
        return f'"{round(value)} B"'
    number = f"{value / scale:.5g}"
    return f'"{number} {unit}"' if unit else number


def _curve(name: str, curve: FittedCurve, source: str) -> list[str]:
    unit = "FLOP" if name.startswith("product.") else "B"
    sizes = ", ".join(f'"{int(size)} {unit}"' for size in curve.at)
    shares = ", ".join(f"{share:.4g}" for share in curve.share)
    lines = [f'[curves."{name}"]', f"at = [{sizes}]", f"share = [{shares}]"]
    return [*lines, 'status = "measured"', f"source = {json.dumps(source)}", ""]
