"""Parts by name: who makes each, and why one can't run somewhere."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from moebench.systems.part_interface import PartCall, Seat, Setting, number, parsed, positions_of
from moebench.workloads.errors import InputError
from moebench.workloads.models.decoder import DecoderShape
from moebench.workloads.part import PARTS, PartWorkload, StudyWorkload

_PAIRS, _SUMS = "moebench.systems.megascale.part_pairs", "moebench.systems.megascale.part_sums"
_GENERATION, _GENERATIONS = "moebench.systems.moesys.part_generation", ("generation", "generation-offloaded")
_TASKS = "moebench.systems.moesys.part_tasks"
_CACHE, _STORED = "moebench.systems.moesys.part_cache", "moebench.systems.moesys.part_stored"
MAKERS = {
    **dict.fromkeys(_GENERATIONS, f"{_GENERATION}:generation"),
    "dispatch": f"{_SUMS}:dispatch",
    "qkv+a2a": f"{_PAIRS}:projection_and_exchange",
    "a2a+outproj": f"{_PAIRS}:exchange_and_projection",
    "ag+scatter+groupedgemm": f"{_PAIRS}:gather_and_products",
    "groupedgemm+gather+rs": f"{_PAIRS}:products_and_reduce",
    "parameter-sync": f"{_SUMS}:parameter_sync",
    "embedding": "moebench.systems.moesys.part_embedding:embedding",
    "task-step": f"{_TASKS}:task_step",
    "gradient-sum": f"{_SUMS}:gradient_sum",
    "row-sum": f"{_SUMS}:row_sum",
    "parameter-gather": f"{_SUMS}:parameter_gather",
    "expert-cache": f"{_CACHE}:expert_cache",
    "stored-step": f"{_STORED}:stored_step",
}
# Of parts that know themselves why they can't run: `(workload, system, ranks) -> a reason, or None`.
PROBLEMS = {
    "expert-cache": f"{_CACHE}:problem", "stored-step": f"{_STORED}:problem", "task-step": f"{_TASKS}:problem"
}  # fmt: skip
PROBLEMS |= dict.fromkeys(_GENERATIONS, f"{_GENERATION}:problem")
# Of parts that know what they take of a rank: `(workload, system, ranks) -> bytes held, FLOPs of a call`.
BURDENS = {"stored-step": f"{_STORED}:burden", "task-step": f"{_TASKS}:burden"}
BURDENS |= dict.fromkeys(_GENERATIONS, f"{_GENERATION}:burden")
# Of parts that keep files while they run: `(workload, ranks) -> bytes of all ranks`.
DISKS = {"stored-step": f"{_STORED}:disk_bytes"}
# What says whether a folder has states that such a part keeps, and `(folder) -> what they are`, all of it read.
STATES = ("moebench.systems.moesys.shard_check:is_store", "moebench.systems.moesys.shard_check:described")
# Of parts whose states are on several tiers: `(workload, system, ranks) -> {tier: bytes, and by the paper}`.
TIERS = {"stored-step": f"{_STORED}:tiers"}
# Of parts whose options depend on their sizes: `(workload, system, ranks) -> None`, raises InputError.
CHECKS = {"generation-offloaded": f"{_GENERATION}:check_options"}
# Of parts some of whose systems are too large for a check: `(system) -> one that does the same with less`.
SMALL = {"generation-offloaded": f"{_GENERATION}:small_system"}
# Of parts with a formula: `(workload, system, ranks, seconds that compute, of that in experts, that copy) -> seconds`.
FORMULAS = {"generation-offloaded": f"{_GENERATION}:by_formula"}
# Counted without ranks: `(workload, system, logits of a routing that is trained) -> numbers`.
COUNTS = {"expert-cache": f"{_CACHE}:hit_rates"}
# Of parts of tasks: `(workload, system, ranks) -> a Seat of each rank`, and `(workload) -> parameters of the model`.
SEATS = {"task-step": f"{_TASKS}:seats"}
PARAMETERS = {"task-step": f"{_TASKS}:parameters"}
# Run on ranks: `(group, systems, sizes, seed) -> numbers by system`.
STUDIES = {
    "training": "moebench.systems.megascale.studies:training_losses",
    "parameter-training": "moebench.systems.megascale.studies:parameter_losses",
    "gradient-error": "moebench.systems.megascale.studies:gradient_errors",
    "row-error": "moebench.systems.megascale.studies:row_errors",
}


def make(setting: Setting) -> PartCall:
    """A part, ready to run.

    Raises:
        InputError: an unknown system, or sizes that it can't run on these ranks.
    """
    workload = setting.workload
    parsed(workload.part, setting.system)  # refuses what is not there
    ranks, per_node = setting.group.size, setting.group.ranks_per_node or setting.group.size
    reason = problem(workload, setting.system, setting.shape, ranks, per_node, setting.tile)
    if reason is not None:
        raise InputError(reason)
    return _found(MAKERS[workload.part])(setting)


def check_options(workload: PartWorkload, system: str, ranks: int) -> None:
    """Refuse options of a system that a part of these sizes can't have.

    Raises:
        InputError: which, and what is allowed.
    """
    if workload.part in CHECKS:
        _found(CHECKS[workload.part])(workload, system, ranks)


def small_system(part: str, system: str) -> str:
    """The system that is tried of a part before a number of this one may appear."""
    return _found(SMALL[part])(system) if part in SMALL else system


def burden(workload: PartWorkload, system: str, ranks: int) -> tuple[float, float] | None:
    """Bytes that a rank holds, and FLOPs of a call; None of a part that does not say so itself."""
    known = BURDENS.get(workload.part)
    return None if known is None else _found(known)(workload, system, ranks)


def disk_bytes(workload: PartWorkload, ranks: int) -> int:
    """Bytes of the files that all ranks keep while a part runs for real."""
    return _found(DISKS[workload.part])(workload, ranks) if workload.part in DISKS else 0


def described_states(folder: Path) -> str | None:
    """What a folder of states holds, in a line, when all of it has been read; None of another folder.

    Raises:
        InputError: which file is damaged or missing.
    """
    is_one, described = map(_found, STATES)
    return described(folder) if is_one(folder) else None


def tiers(workload: PartWorkload, system: str, ranks: int) -> Mapping[str, tuple[float, float]]:
    """Of each tier the bytes of all ranks, as they are and as the paper says; of most parts none."""
    return _found(TIERS[workload.part])(workload, system, ranks) if workload.part in TIERS else {}


def has_formula(part: str) -> bool:
    """Whether there is a formula for the time of a part's call."""
    return part in FORMULAS


def by_formula(
    workload: PartWorkload, system: str, ranks: int, compute_s: float, experts_s: float, copying_s: float
) -> float | None:
    """Seconds of a call by the part's formula, from what it computes and copies; None where there is none."""
    known = FORMULAS.get(workload.part)
    return None if known is None else _found(known)(workload, system, ranks, compute_s, experts_s, copying_s)


def counted(workload: StudyWorkload, system: str, logits_of: Callable[..., Any] | None) -> Any:
    """What is counted of a part without ranks."""
    return _found(COUNTS[workload.part])(workload, system, logits_of)


def seats_of(workload: PartWorkload, system: str, ranks: int) -> tuple[Seat, ...]:
    """What each rank does in a part of tasks.

    Raises:
        InputError: tasks that can't be seated so.
    """
    return _found(SEATS[workload.part])(workload, system, ranks)


def parameters_of(workload: PartWorkload) -> int:
    """Of the model of a part of tasks, those of all tasks together."""
    return _found(PARAMETERS[workload.part])(workload)


def _found(target: str) -> Callable[..., Any]:
    module, function = target.split(":")
    return getattr(import_module(module), function)


def problem(
    workload: PartWorkload | StudyWorkload,
    system: str,
    shape: DecoderShape | None,
    ranks: int,
    per_node: int,
    tile: int,
) -> str | None:
    """Why a part can't run on so many ranks, naming the sizes; None when it can."""
    reason = workload.problem(ranks)
    part = PARTS[workload.part]
    if reason is not None:
        return reason
    if workload.part in PROBLEMS:
        return _found(PROBLEMS[workload.part])(workload, system, ranks)
    if workload.part in ("parameter-sync", "gradient-sum", "parameter-gather") and per_node == ranks:
        return f"{workload.part} is among replicas on several nodes, and there is one"
    if workload.part == "parameter-sync" and workload.size("of_part") not in (0, 1):
        return f"of_part = {workload.size('of_part')}: 1 where attention's megabytes are of a rank's part, else 0"
    if "tokens" in part.sizes and workload.size("tokens") % ranks:
        return f"tokens = {workload.size('tokens')} is not divisible by ranks = {ranks}"
    if workload.part == "dispatch" and workload.size("tokens") // ranks * workload.size("top_k") % ranks:
        return f"top_k = {workload.size('top_k')} rows of {workload.size('tokens') // ranks} tokens can't go to {ranks}"
    if "vocabulary" in part.sizes:
        vocabulary, width = workload.size("vocabulary"), workload.size("d_model")
        if not vocabulary or not width or width % ranks:
            return f"vocabulary = {vocabulary}, d_model = {width}: at least 1, and columns for ranks = {ranks} evenly"
    if "products" in part.sizes and workload.size("products") not in (1, 2):
        return f"products = {workload.size('products')}: 1, or 2 with a gate's"
    if shape is None or isinstance(workload, StudyWorkload):
        return None
    return _of_shape(workload, system, shape, ranks, tile)


def _of_shape(workload: PartWorkload, system: str, shape: DecoderShape, ranks: int, tile: int) -> str | None:
    tokens = workload.size("tokens") // ranks
    if workload.part in ("qkv+a2a", "a2a+outproj"):
        if shape.heads % ranks or shape.kv_heads % ranks:
            return f"heads = {shape.heads} and kv_heads = {shape.kv_heads} can't be dealt to ranks = {ranks}"
    elif shape.experts % ranks:
        return f"experts = {shape.experts} is not divisible by ranks = {ranks}"
    stem, options = parsed(workload.part, system)
    if stem == "fused" and tokens % tile:
        return f"tokens = {workload.size('tokens')} on ranks = {ranks}: {tokens} rows are no whole tiles of {tile}"
    chunks = tokens // tile if stem == "fused" else number(options, "chunks", 1)
    if chunks and (tokens % chunks or positions_of(workload.size("tokens")) // ranks % chunks):
        return f"chunks = {chunks} can't cut the {tokens} tokens of a rank"
    return None

