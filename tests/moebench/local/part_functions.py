"""What ranks run in the tests of real parts; apart, so that a rank does not import pytest."""

import torch

from moebench.cases.case import Case
from moebench.local.part_step import part_step
from moebench.trace.recorder import Recorder
from moebench.workloads.part import workload_of

SIZES = {"tokens": 64, "d_model": 16, "top_k": 2, "products": 2, "parameters": 1000}
SUMMED = {"attention_mb": 1, "expert_mb": 1, "sent_percent": 2, "of_part": 0}
VIT = {"layers": 1, "heads": 2, "positions": 3, "recomputed": 1}
PARTS = {
    "dispatch": ("all-to-all", "all-gather", "reduce-scatter"),
    "parameter-sync": ("tp-attention", "sp-attention"),
    "gradient-sum": ("fp32-reduce-scatter", "bf16-all-to-all", "bf16-ring"),
    "row-sum": ("bf16-reduce-scatter", "fp8-all-to-all"),
    "task-step": ("moesys", "moesys+rows=stay", "in-line", "ddp"),
}


def case_of(part, system):
    """A small case of a part."""
    workload = workload_of(part, SIZES | SUMMED | VIT, batches=(9, 4), dtype="fp32" if part == "task-step" else "")
    return Case("s", "e", system, workload, "2x2-h800", "2x2", "cluster")


def recorded(group):
    """What each part runs, twice: its operators and what they send, of the second call."""
    found = {}
    for part, systems in PARTS.items():
        for system in systems:
            step = part_step(case_of(part, system), torch.device("cpu"), group)
            step.run()
            with Recorder(step.persistent) as recorder:
                step.run()
            found[part, system] = [(op.name, op.region, op.bytes, op.collective) for op in recorder.ops]
    return found
