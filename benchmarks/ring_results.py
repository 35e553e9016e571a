"""What `benchmarks.ring_inference` found, as a section of docs/accuracy.md: memory against time beside the formula.

Text only: the page can be written again from the file without measuring.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.ring_inference import NEAR, Way, knee


def read(path: Path) -> dict[str, Any]:
    """A file that the measurement wrote."""
    return json.loads(path.read_text())


def markdown(found: Mapping[str, Any]) -> str:
    """A table a batch, and what follows from it."""
    settings = found["settings"]
    layers, mib = settings["layers"], found["layer_bytes"] / 2**20
    parts = [
        f"{layers} layers of {mib:.0f} MiB of experts in {settings['dtype']}; a ring has K of them in memory, and the\n"
        f"next ones are read from the disk (page cache: {settings['page_cache']}) while one computes, on "
        f"{settings['threads']} thread.\nTime of a token over that without offload in the same block, median and 95 % "
        f"interval; the formula\nis that of `systems/moesys/hiding.py`, given the times of one layer and one copy."
    ]
    for batch in found["batches"]:
        parts += [_heading(batch), _table(batch), _told(batch, layers)]
    return "\n\n".join(parts)


def _heading(batch: Mapping[str, Any]) -> str:
    times = batch["times"]
    computes_ms, copy_ms = 1e3 * (times["dense_s"] + times["experts_s"]), 1e3 * times["copy_s"]
    hides = "copies can hide" if computes_ms >= copy_ms else "copies cannot hide"
    return (
        f"**{batch['batch']} sequences**: a layer computes {computes_ms:.1f} ms, a copy takes {copy_ms:.1f} ms, so "
        f"that {hides}."
    )


def _table(batch: Mapping[str, Any]) -> str:
    lines = ["| | memory of experts | ms a token | to no offload | 95 % | by formula |", "|---|---|---|---|---|---|"]
    whole = next(line["held_bytes"] for line in batch["lines"] if line["way"]["way"] == "none")
    for line in batch["lines"]:
        ratio, expected = line["ratio"], line["predicted"]
        lines.append(
            f"| {Way(**line['way']).name} | {100 * line['held_bytes'] / whole:.1f} % | "
            f"{1e3 * line['token_s']['median']:.1f} | {ratio['median']:.3f} | "
            f"{ratio['low']:.3f} to {ratio['high']:.3f} | {'' if expected is None else f'{expected:.2f}'} |"
        )
    return "\n".join(lines)


def _told(batch: Mapping[str, Any], layers: int) -> str:
    rings = {
        line["way"]["slots"]: line["ratio"]
        for line in batch["lines"]
        if line["way"]["way"] in ("ring", "none") and not line["way"]["keep"]
    }
    slots = knee({k: ratio["median"] for k, ratio in rings.items() if k < layers})
    near = [k for k, ratio in rings.items() if k < layers and ratio["median"] <= 1 + NEAR]
    within = f"the median is within {100 * NEAR:.0f} % of no offload for K = {', '.join(map(str, sorted(near)))}"
    within = within if near else f"no ring is within {100 * NEAR:.0f} % of no offload"
    known = [line for line in batch["lines"] if line["predicted"] is not None]
    far = max(known, key=lambda line: abs(math.log(line["ratio"]["median"] / line["predicted"])))
    return (
        f"Knee: K = {slots}, from which more slots gain less than {100 * NEAR:.0f} %; {within}. Furthest from the "
        f"formula: {Way(**far['way']).name}, {far['ratio']['median']:.2f} measured and {far['predicted']:.2f} expected."
    )
