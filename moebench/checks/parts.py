"""Correct before fast, for parts: no number of one before all ranks get what its definition says.

Tried on 4 real gloo ranks as 2x2, small, twice from the same call: in float64 where the dtype doesn't matter, else in
the part's own, within the error that is stated of it. A part that is studied is held to what it studies. What came out
is remembered with a hash of the code.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from moebench.cases.case import Case
from moebench.cases.parts import of_part
from moebench.checks.correctness import RANKS, RANKS_PER_NODE, TIMEOUT_S, Status, code_hash, on_ranks, remembered
from moebench.kernels.collectives.group import Group
from moebench.systems.part_interface import Setting, number, parsed
from moebench.systems.part_registry import make, small_system
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.models.decoder import DecoderShape
from moebench.workloads.part import PARTS, PartWorkload

TIMEOUT_MORE_S = 5.0
SHAPE = DecoderShape(16, 8, 4, 4, 8, 8, 3)
SIZES = {"tokens": 32, "d_model": 24, "top_k": 3, "products": 2, "vocabulary": 19, "parameters": 3001}
_GENERATION = {"sequences": 2, "prompt": 3, "generated": 3, "capacity_percent": 100}  # some tokens are dropped
# Of a part by itself.
SIZES_OF = {
    "parameter-sync": {"attention_mb": 1, "expert_mb": 1, "sent_percent": 1, "of_part": 1},  # ten kilobytes
    "generation": _GENERATION,
    "generation-offloaded": _GENERATION,
    "stored-step": {"tokens": 32, "d_model": 24, "d_ffn": 12, "experts": 8, "top_k": 2, "layers": 3,
                    "accumulated": 2},
    "expert-cache": {"tokens": 3, "experts": 4, "top_k": 2, "layers": 2, "steps": 12, "turn_steps": 5, "passes": 3,
                     "cache_sizes": 3},
    "task-step": {"d_model": 8, "layers": 2, "heads": 2, "positions": 3, "recomputed": 1},
}  # fmt: skip
ROUTING = "zipf-1"  # of a part that has any
GPT = "gpt2-moe+layers=7+d_model=16+heads=2+vocabulary=64+sequence=8"  # four layers of experts
BATCHES = (6, 3)  # of two tasks; not every rank reads of the second, nor do rows of the first come to all of its ranks
TILE = 2
OWN_DTYPE = ("gradient-sum", "row-sum", "parameter-gather")  # whose point is how they round
TRIED_BY = {"gradient-error": "gradient-sum", "training": "gradient-sum", "row-error": "row-sum",
            "parameter-training": "parameter-gather"}  # fmt: skip
TARGET = f"{__name__}:run_rank"


def check(cases: Sequence[Case]) -> Iterator[Status]:
    """Whether the part of each case computes what it should, in their order; one start for all not remembered."""
    yield from remembered(cases, _key, _tried)


def _tried(cases: Sequence[Case]) -> list[Status]:
    return on_ranks(TARGET, [trial(case) for case in cases], TIMEOUT_S, TIMEOUT_MORE_S)


Trial = tuple[str, str, int, int]


def trial(case: Case) -> Trial:
    """Part, system, how many products and choices a token: what the check tries of a case."""
    workload = of_part(case)
    part, sizes = TRIED_BY.get(workload.part, workload.part), dict(workload.sizes)
    top_k = min(2, sizes["top_k"]) if PARTS[part].of_gpt else SIZES["top_k"]
    return part, small_system(part, case.system), sizes.get("products", SIZES["products"]), top_k


def run_rank(group: Group, trials: Sequence[Trial]) -> list[str | None]:
    """What is wrong with each on this rank, or None."""
    return [_problem(group, *one) for one in trials]


def _problem(group: Group, part: str, system: str, products: int, top_k: int) -> str | None:
    known = PARTS[part]
    chunks = number(parsed(part, system)[1], "chunks", 1)
    tokens = SIZES["tokens"] * (chunks // math.gcd(chunks, SIZES["tokens"] // group.size))  # that the chunks divide
    sizes = {**SIZES, "products": products, "top_k": top_k, "tokens": tokens, **SIZES_OF.get(part, {})}
    own = tuple((name, sizes[name]) for name in known.sizes)
    model, routing = GPT if known.of_gpt else "", ROUTING if known.has_routing else ""
    batches = BATCHES if known.of_tasks else ()
    workload = PartWorkload(part, own, model, known.dtype, routing=routing, batches=batches)
    dtype = torch_dtype(known.dtype) if part in OWN_DTYPE else torch.float64
    shape = SHAPE if known.of_model else None
    first = None
    for run in (1, 2):  # both on every rank, whatever one of them sees: the others wait for it
        if run == 1 or part == "gradient-sum":  # whose buffer is the sum's after a run
            call = make(Setting(workload, system, group, torch.device("cpu"), dtype, shape, TILE))
        problem = call.wrong(call.run())
        if problem is not None and first is None:
            first = f"{part} by {system}, run {run} on {group.size} ranks, rank {group.index}: {problem}"
    return first


def _key(case: Case) -> str:
    here = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    parts = [*trial(case), RANKS, RANKS_PER_NODE, here, code_hash(), torch.__version__, sys.version]
    return hashlib.sha256(json.dumps(["part", *parts]).encode()).hexdigest()[:32]
