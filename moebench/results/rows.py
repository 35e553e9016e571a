"""Result rows: tidy, one metric value a row, with the keys of its case."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moebench.case import Case

STATUSES = ("passed", "wrong", "failed", "out-of-memory", "unsupported", "skipped")
CPU_BOUND = "cpu-bound"  # detail["mark"] of a summary whose processors set the pace of a network; nothing judges by it


@dataclass(frozen=True)
class Row:
    """One value of one metric of one case.

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
    gate: str
    batch_size: int
    topology: str
    size: str
    hardware: str
    experts: int
    dtype: str
    input_gradient: bool
    conventions: str
    implementation: str
    is_default: bool
    engine: str
    metric: str
    unit: str
    value: float | None
    low: float | None = None
    high: float | None = None
    sample: int | None = None
    status: str = "passed"
    reason: str = ""
    draws: tuple[float, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)

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
        gate=case.workload.gate.label,
        batch_size=case.workload.batch_size,
        topology=case.topology,
        size=case.size,
        hardware=hardware,
        experts=case.workload.experts,
        dtype=case.workload.dtype,
        input_gradient=case.workload.input_gradient,
        conventions=case.conventions,
        implementation=case.implementation,
        is_default=case.is_default,
        engine=case.engine,
        metric=metric,
        unit=unit,
        value=value,
        **rest,
    )
