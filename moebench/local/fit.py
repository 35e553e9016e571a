"""From the probes' times to the numbers of a Hardware file: values, ranges, curves.

Everything is a ratio of bytes or FLOPs to the device's part of a measured time, which is the time less that of a call
without work: on a CPU the two follow each other on one thread.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

LEAST_SPREAD = 0.05  # the least half-width of a range: clock rates wander that much from one hour to the next
LEAST_DEVICE_S = 1e-7
LEAST_BYTES, LEAST_FLOPS = 1 << 18, 1 << 24  # smaller calls say nothing about peak rates: the clock is too coarse
NARROW = 8  # products with a dimension up to this are limited by memory


@dataclass(frozen=True)
class Range:
    """A measured value with the range that its repeats give."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class FittedCurve:
    """Share of the peak at each size."""

    at: tuple[float, ...]
    share: tuple[float, ...]


@dataclass
class Fit:
    """What calibration found, named as in moebench.workloads.machine.Hardware."""

    parameters: dict[str, Range] = field(default_factory=dict)
    curves: dict[str, FittedCurve] = field(default_factory=dict)


def rising_curve(at: Sequence[float], share: Sequence[float]) -> FittedCurve:
    """The curve through measured shares; where more work was measured to take less time, it takes as long."""
    sizes = np.array(at, dtype=float)
    times = np.maximum.accumulate(sizes / np.array(share))
    return FittedCurve(tuple(at), tuple(map(float, sizes / times)))


def range_of(repeats: Sequence[float]) -> Range:
    """Median, and least to largest repeat widened by their distance on either side.

    The next calibration is one more repeat: with four before it, it falls outside of their plain extremes two times in
    five, and outside of the widened ones hardly ever.
    """
    value, low, high = median(repeats), min(repeats), max(repeats)
    spread = max(high - low, LEAST_SPREAD * value)
    return Range(value, max(low - spread, 0.5 * low), high + spread)


def fit(messages: Iterable[Mapping[str, Any]]) -> Fit:
    """Fit what the probe processes measured; each message carries its `repeat`."""
    messages = list(messages)
    found = Fit()
    _fit_issue(found, [m for m in messages if "issue" in m])
    call_s = median(m["seconds"] for m in messages if m.get("call") == "empty")
    _fit_memory(found, [m for m in messages if m.get("kind") not in (None, "product")], call_s)
    _fit_products(found, [m for m in messages if m.get("kind") == "product"], call_s)
    return found


def _fit_issue(found: Fit, messages: Sequence[Mapping[str, Any]]) -> None:
    for name in dict.fromkeys(m["issue"] for m in messages):
        found.parameters[name] = range_of([m["seconds"] for m in messages if m["issue"] == name])


def _device_s(message: Mapping[str, Any], call_s: float) -> float:
    return max(message["seconds"] - call_s, LEAST_DEVICE_S)


def _by(messages: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for message in messages:
        groups.setdefault(tuple(message[key] for key in keys), []).append(message)
    return groups


def _fit_memory(found: Fit, messages: Sequence[Mapping[str, Any]], call_s: float) -> None:
    rates: dict[str, dict[int, list[float]]] = {}
    best: dict[int, float] = {}
    for (kind, _, size), group in _by(messages, "kind", "label", "size").items():
        each = [m["bytes"] / _device_s(m, call_s) for m in group]
        rates.setdefault(kind, {}).setdefault(size, []).append(median(each))
        for m, rate in zip(group, each):
            if m["bytes"] < LEAST_BYTES:
                continue
            best[m["repeat"]] = max(best.get(m["repeat"], 0.0), rate)
    bandwidth = range_of(list(best.values()))
    found.parameters["gpu.memory.bandwidth"] = bandwidth
    for kind, by_size in rates.items():
        sizes = sorted(by_size)
        middle = [float(np.exp(np.mean(np.log(by_size[size])))) for size in sizes]
        found.curves[kind] = rising_curve(sizes, [rate / bandwidth.value for rate in middle])
        found.parameters[f"gpu.efficiency.{kind}"] = _factor(kind, messages, dict(zip(sizes, middle)), call_s)


def _factor(kind: str, messages: Sequence[Mapping[str, Any]], curve: Mapping[int, float], call_s: float) -> Range:
    """1, with the range over repeats and over the different operators of the kind (their 10 to 90 % of ratios)."""
    ratios = [
        m["bytes"] / _device_s(m, call_s) / curve[m["size"]]
        for m in messages
        if m["kind"] == kind and m["size"] >= 1 << 16
    ]
    low, high = np.quantile(ratios, (0.1, 0.9))
    return Range(1.0, min(float(low), 1 - LEAST_SPREAD), max(float(high), 1 + LEAST_SPREAD))


def _fit_products(found: Fit, messages: Sequence[Mapping[str, Any]], call_s: float) -> None:
    narrow = [m for m in messages if min(m["shape"][:3]) <= NARROW]
    for (dtype,), group in _by([m for m in messages if min(m["shape"][:3]) > NARROW], "dtype").items():
        best: dict[int, float] = {}
        for m in group:
            if m["flops"] >= LEAST_FLOPS:
                best[m["repeat"]] = max(best.get(m["repeat"], 0.0), m["flops"] / _device_s(m, call_s))
        peak = range_of(list(best.values()))
        found.parameters[f"gpu.peak.{dtype}"] = peak
        by_flops = _by(group, "flops")
        if len(by_flops) < 2:
            continue
        at = sorted(flops for (flops,) in by_flops)
        share = [median(m["flops"] / _device_s(m, call_s) for m in by_flops[(flops,)]) / peak.value for flops in at]
        found.curves[f"product.{dtype}"] = rising_curve(at, [min(s, 1.0) for s in share])
    found.parameters["gpu.product.bandwidth_share"] = _bandwidth_share(
        [m for m in narrow if m["dtype"] == "fp32"], found.parameters["gpu.memory.bandwidth"].value, call_s
    )


def _bandwidth_share(narrow: Sequence[Mapping[str, Any]], bandwidth: float, call_s: float) -> Range:
    """Of narrow fp32 products, with the middle half of shapes and repeats as its range.

    One number serves all dtypes and shapes. Narrow bf16 products can be ten times slower in some library versions; the
    law has no place for that, and a share that low would make wide products look limited by memory.
    """
    shares = [m["bytes"] / _device_s(m, call_s) / bandwidth for m in narrow]
    low, middle, high = np.quantile(shares, (0.25, 0.5, 0.75))
    return Range(float(middle), float(low), float(high))
