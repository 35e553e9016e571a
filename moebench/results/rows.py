"""Result rows: tidy, one metric value a row, with the keys of its case."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, get_args, get_origin, get_type_hints

from moebench.cases.case import Case

# Columns that tell one kind of workload from another: a row has all of one line.
KIND_COLUMNS = (
    ("gate", "batch_size", "experts", "input_gradient"),
    ("op", "shape", "direction", "tokens"),
    ("payload_bytes",),
    ("gate", "tokens", "experts", "top_k"),
    ("model", "gate", "batch_size"),
    ("model", "global_batch", "stages"),
    ("part", "shape"),
    ("model", "global_batch", "most_micro_batch"),
)
TIMES = ("step_time", "kernel_time", "collective_time", "iteration_time", "part_time")
SUPPORTED, DEVIATION = "supported", "deviation"  # 1 where a system keeps a rule; how far numbers are from exact ones
HIT_RATE = "hit_rate"  # of requests that find what they ask for
BY_SIZE, CACHED = "hit_rate_by_size", "cached"  # the same by detail: share of all states that the cache holds
USED = "experts_used"  # share of a layer's experts that a step needs
SUBJECTS = (*TIMES, SUPPORTED, DEVIATION, HIT_RATE)  # the metric that a case is about
_SUBJECT_OF = (
    *("step_time", "kernel_time", "collective_time", SUPPORTED, "step_time"),
    *("iteration_time", "part_time", "iteration_time"),
)
STATUSES = ("passed", "wrong", "failed", "out-of-memory", "unsupported", "skipped")
HOT = ("", "hot")  # detail["regime"] of rows that stand for their case: none, or called in a loop
CPU_BOUND = "cpu-bound"  # detail["mark"] of a summary whose processors set the pace of a network; nothing judges by it


@dataclass(frozen=True, kw_only=True)
class Row:
    """One value of one metric of one case; columns that its kind of workload doesn't have are None.

    Attributes:
        metric: name with its unit in `unit` (SI: `s`, `B`, `FLOP`, `1`).
        value: None where `status` is not `passed`.
        low, high: interval (5 to 95 % of the draws in `sim`; bootstrap 95 % where measured).
        sample: index of a measured sample, None for a summary or a deterministic value.
        draws: `sim` only: the value under each draw of the uncertain parameters; draw i is the same machine for every
            case with the same topology.
        detail: metric-specific keys (region, operator, parameter, ...).
    """

    case: str
    case_hash: str
    suite: str
    experiment: str
    system: str
    topology: str
    size: str
    hardware: str
    dtype: str
    conventions: str
    implementation: str
    is_default: bool
    engine: str
    metric: str
    unit: str
    value: float | None
    model: str | None = None
    gate: str | None = None
    batch_size: int | None = None
    input_gradient: bool | None = None
    part: str | None = None
    routing: str | None = None
    op: str | None = None
    shape: str | None = None
    direction: str | None = None
    variant: str | None = None
    tokens: int | None = None
    experts: int | None = None
    top_k: int | None = None
    d_model: int | None = None
    d_ffn: int | None = None
    payload_bytes: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    stages: int | None = None
    chunks: int | None = None
    skew: float | None = None
    most_micro_batch: int | None = None
    products: int | None = None
    attention_mb: int | None = None
    expert_mb: int | None = None
    sent_percent: int | None = None
    of_part: int | None = None
    vocabulary: int | None = None
    parameters: int | None = None
    steps: int | None = None
    sequences: int | None = None
    prompt: int | None = None
    generated: int | None = None
    capacity_percent: int | None = None
    layers: int | None = None
    accumulated: int | None = None
    turn_steps: int | None = None
    passes: int | None = None
    cache_sizes: int | None = None
    heads: int | None = None
    positions: int | None = None
    recomputed: int | None = None
    batches: str | None = None
    low: float | None = None
    high: float | None = None
    sample: int | None = None
    status: str = "passed"
    reason: str = ""
    draws: tuple[float, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """Whether there is a number, and one that may be judged by."""
        return self.value is not None and self.detail.get("mark") != CPU_BOUND

    def to_json(self) -> dict[str, Any]:
        """A JSON object; empty fields are left out."""
        return {k: v for k, v in vars(self).items() if v is not None and v != "" and v != () and v != {}} | {
            "value": self.value
        }


def row_of(case: Case, hardware: str, metric: str, unit: str, value: float | None, **rest: Any) -> Row:
    """The row of one metric of `case`."""
    return Row(
        case=case.name,
        case_hash=case.hash,
        suite=case.suite,
        experiment=case.experiment,
        system=case.system,
        topology=case.topology,
        size=case.size,
        hardware=hardware,
        dtype=case.workload.dtype,
        conventions=case.conventions,
        implementation=case.implementation,
        is_default=case.is_default,
        engine=case.engine,
        metric=metric,
        unit=unit,
        value=value,
        **case.workload.columns,
        **rest,
    )


def without_number(case: Case, hardware: str, status: str, reason: str) -> Row:
    """The row of a case that has no value of what it is about."""
    unit = "s" if case.workload.metric in TIMES else "1"
    return row_of(case, hardware, case.workload.metric, unit, None, status=status, reason=reason)


_NEVER_NEGATIVE = ("s", "B", "FLOP")
_ROUNDING = 1e-4  # of draws, which are stored with fewer digits than the value


def problem(item: Mapping[str, Any]) -> str | None:
    """Why a JSON object is no row, or None: a key is missing or unknown, or its value is of another type."""
    shape = tuple(item), tuple(map(type, item.values()))  # the rows of a file have a few between them
    if shape not in _GOOD_SHAPES:
        found = _shape_problem(item)
        if found:
            return found
        if len(_GOOD_SHAPES) < _MOST_SHAPES:
            _GOOD_SHAPES.add(shape)
    for name in _NUMBERS:
        value = item.get(name)
        if value is not None and not -_LARGEST <= value <= _LARGEST:
            return f"{name} is {str(value)[:40]}, not a finite number"
    if item.get("status", "passed") not in STATUSES:
        return f"status is {item['status']!r}, not one of: {', '.join(STATUSES)}"
    draws = item.get("draws", ())
    if not all(v is None or type(v) in (float, int) for v in draws):
        return "draws holds something else than numbers"
    return _contradiction(item, draws)


def _contradiction(item: Mapping[str, Any], draws: Sequence[float | None]) -> str | None:
    """What a row says that can't be, as after an edit by hand, or None."""
    value, metric = item.get("value"), item.get("metric")
    if value is None:
        if metric in SUBJECTS and item.get("status", "passed") == "passed" and not draws:
            return f"{metric} passed and has no value"
        return None
    if item.get("status", "passed") != "passed":
        return f"value is {value}, and a case that is {item['status']} has none"
    low, high = item.get("low"), item.get("high")
    if low is not None and high is not None and low > high:
        return f"low is {low}, above high, {high}"
    if value < 0 and item.get("unit") in _NEVER_NEGATIVE:
        return f"value is {value}, and {metric} can't be negative"
    nominal = draws[0] if draws else None
    if nominal is not None and abs(value - nominal) > _ROUNDING * abs(nominal):
        return f"value is {value}, and the first draw, the nominal one, {nominal}"
    return None


def _shape_problem(item: Mapping[str, Any]) -> str | None:
    """What is wrong with the keys of an object or the types of their values, or None."""
    for name, value in item.items():
        if name not in _KINDS:
            return f"unknown key {name!r}"
        if not isinstance(value, _KINDS[name]) or (isinstance(value, bool) and bool not in _KINDS[name]):
            return f"{name} is {value!r}"
    missing = [name for name in _NEEDED if name not in item]
    missing += [] if any(all(name in item for name in columns) for columns in KIND_COLUMNS) else _lacking(item)
    return f"missing key {missing[0]!r}" if missing else None


def _lacking(item: Mapping[str, Any]) -> list[str]:
    """Columns that are missing of the kind that the row has most of."""
    nearest = max(KIND_COLUMNS, key=lambda columns: sum(name in item for name in columns) / len(columns))
    return [name for name in nearest if name not in item]


def with_finite_numbers(rows: Sequence[Row]) -> list[Row]:
    """The rows of a case; where a number of them is not finite, one row in their place that says so.

    A draw may be NaN: out of memory.
    """
    for row in rows:
        numbers = [v for v in (row.value, row.low, row.high) if v is not None]
        if not all(map(math.isfinite, numbers)) or any(map(math.isinf, row.draws)):
            reason = f"its {row.metric} is not a finite number"
            bare = replace(row, low=None, high=None, sample=None, draws=(), detail={})
            return [replace(bare, metric=_time_of(row), unit="s", value=None, status="failed", reason=reason)]
    return list(rows)


def _time_of(row: Row) -> str:
    """The metric that the row's case is about."""
    return next((t for t, columns in zip(_SUBJECT_OF, KIND_COLUMNS) if _has(row, columns)), TIMES[0])


def _has(row: Row, columns: Sequence[str]) -> bool:
    return all(getattr(row, name) is not None for name in columns)


def _kinds(hint: Any) -> tuple[type, ...]:
    """The types that a field's JSON value may have."""
    kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
    wider = {float: (float, int), tuple: (list,), Mapping: (dict,)}
    return tuple(one for kind in kinds for one in wider.get(get_origin(kind) or kind, (kind,)))


_NUMBERS = ("value", "low", "high")
_LARGEST = sys.float_info.max
_GOOD_SHAPES: set[tuple[tuple[str, ...], tuple[type, ...]]] = set()
_MOST_SHAPES = 10_000
_KINDS = {name: _kinds(hint) for name, hint in get_type_hints(Row).items()}
# A row without a unit leaves it out, as every field that is empty.
_NEEDED = [f.name for f in fields(Row) if f.default is MISSING and f.default_factory is MISSING and f.name != "unit"]
