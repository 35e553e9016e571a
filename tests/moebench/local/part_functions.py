"""What ranks run in the tests of real parts; apart, so that a rank does not import pytest."""

from dataclasses import replace

import torch

from moebench.cases.case import Case
from moebench.local.op_times import timed_program
from moebench.local.part_step import part_step
from moebench.workloads.part import workload_of

SIZES = {"tokens": 64, "d_model": 16, "top_k": 2, "products": 2, "parameters": 1000}
SUMMED = {"attention_mb": 1, "expert_mb": 1, "sent_percent": 2, "of_part": 0}
STORED = {"d_ffn": 8, "experts": 8, "accumulated": 4}
VIT = {"layers": 1, "heads": 2, "positions": 3, "recomputed": 1}
PARTS = {
    "dispatch": ("all-to-all", "all-gather", "reduce-scatter"),
    "parameter-sync": ("tp-attention", "sp-attention"),
    "gradient-sum": ("fp32-reduce-scatter", "bf16-all-to-all", "bf16-ring"),
    "row-sum": ("bf16-reduce-scatter", "fp8-all-to-all"),
    "stored-step": ("2d", "none+cache_percent=0+slots=1"),
    "task-step": ("moesys", "moesys+rows=stay", "in-line", "ddp"),
}


def case_of(part, system, **sizes):
    """A small case of a part."""
    is_stored = part == "stored-step"
    dtype, routing = "fp32" if is_stored or part == "task-step" else "", "zipf-1.5" if is_stored else ""
    workload = workload_of(part, SIZES | SUMMED | STORED | VIT | sizes, batches=(9, 4), dtype=dtype, routing=routing)
    return Case("s", "e", system, workload, "2x2-h800", "2x2", "cluster")


def recorded(group):
    """What each part runs: its program, when all its turns are over and begin anew, as a measurement records it."""
    found = {}
    for part, systems in PARTS.items():
        for system in systems:
            step = part_step(case_of(part, system), torch.device("cpu"), group)
            step.all_turns()
            program, _ = timed_program(step.run, step.persistent, step.turns, repeats=2)
            found[part, system] = replace(program, rank=group.rank, stands_for=(group.rank,))
    return found
