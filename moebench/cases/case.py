"""One point of an experiment: everything that decides a number, with a readable name and a content hash."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from moebench.workloads.workload import Workload


def fields_of(workload: Workload) -> dict[str, Any]:
    """Everything that a workload says, as plain data: every kind is a dataclass."""
    data: Any = workload
    return asdict(data)


@dataclass(frozen=True)
class Case:
    """One system on one workload on one topology under one engine.

    Attributes:
        system: or for a kernel, which has none, the implementation.
        conventions: `common` or `as-shipped`.
        implementation: of the kernels: `torch`, `triton`, `reference`, or the name of another system's variant.
        assumptions: what the paper leaves open and the suite chose: `gpu`, `experts`, `input_gradient` -> value.
        is_default: whether every assumption is the suite's first choice.
        overrides: `--set` values, parameter name -> text.
    """

    suite: str
    experiment: str
    system: str
    workload: Workload
    topology: str
    size: str
    engine: str
    conventions: str = "common"
    implementation: str = "torch"
    assumptions: Mapping[str, str] = field(default_factory=dict)
    is_default: bool = True
    overrides: Mapping[str, str] = field(default_factory=dict)

    @property
    def point(self) -> str:
        """The name without the system: what two systems must share to be compared."""
        before, after = self.workload.labels
        parts = [self.experiment, *before, self.topology, *after]
        if self.conventions != "common":
            parts.append(self.conventions)
        return "/".join(parts)

    @property
    def name(self) -> str:
        """The point and the system.

        `overall/switch/b32/4x8-titan-rtx/e32/reference`, `topk-kernel/topk_gate/t8192-e16-k1-fp32/1x1-h200/triton`.
        """
        return f"{self.point}/{self.system}"

    @cached_property
    def hash(self) -> str:
        """16 hex digits over everything that decides the number."""
        text = json.dumps(asdict(self) | {"assumptions": dict(self.assumptions)}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
