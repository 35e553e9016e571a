"""Planning an experiment of parts: parts x sizes x places x systems, under each reading of what a paper leaves open."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import product

from moebench.cases.case import Case
from moebench.cases.gates import ENGINE as COUNT
from moebench.cases.plan import Context, chosen_experiments, wanted
from moebench.workloads.errors import InputError
from moebench.workloads.machine import Topology
from moebench.workloads.models.decoder import DecoderShape
from moebench.workloads.part import PARTS, PartWorkload, StudyWorkload, workload_of
from moebench.workloads.suite import PartExperiment, PartGrid, PartReading

ONE_RANK = "1x1"
OF_ATTENTION = ("qkv+a2a", "a2a+outproj")  # whose products a model with latent attention does not have
CPU_BYTES, CPU_FLOPS = 16 * 2**20, 2e10  # of a rank; ranks of this machine share its cores and memory


def names(experiment: PartExperiment, source: str) -> Mapping[str, Sequence[object]]:
    """What filters may name of an experiment.

    Raises:
        InputError: a system that its part doesn't have, or a fault in a model's file, or attention that
            is not the part's.
    """
    from moebench.systems.part_interface import parsed
    from moebench.workloads.load_decoder import load_decoder

    where = f"{source}: experiment {experiment.name}"
    if ONE_RANK in experiment.sizes and all(PARTS[grid.part].least_ranks > 1 for grid in experiment.parts):
        raise InputError(f"{where}: sizes: {ONE_RANK} is one rank, {experiment.parts[0].part} takes several")
    for grid in experiment.parts:
        for name in grid.systems:
            try:
                parsed(grid.part, name)
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
        if PARTS[grid.part].is_studied:
            _check_studies(experiment, grid, where)
        for model in grid.models:
            if grid.part in OF_ATTENTION and load_decoder(model, where).latent is not None:
                raise InputError(f"{where}: part {grid.part} has grouped heads, model {model} has latent attention")
    known = [name for grid in experiment.parts for name in PARTS[grid.part].systems]
    return {
        "dtype": [
            dtype or PARTS[grid.part].dtype
            for grid in experiment.parts
            for dtype in grid.dtypes or [reading.dtype for reading in experiment.readings]
        ],
        "system": list(dict.fromkeys([*known, *experiment.systems])),
    }


def _check_studies(experiment: PartExperiment, grid: PartGrid, where: str) -> None:
    """Refuse a study whose sizes have no meaning: no rank is asked, so that nobody would say so later."""
    from moebench.systems.part_registry import problem

    least = PARTS[grid.part].least_ranks
    for reading, system in product(experiment.readings, grid.systems):
        for workload in workloads(grid, reading):
            reason = problem(workload, system, None, least, least, 1)
            if reason is not None:
                raise InputError(f"{where}: part {grid.part}: {reason}")


def cases(experiment: PartExperiment, context: Context) -> Iterator[Case]:
    """The cases of an experiment, reading by reading; a quick look has the first one, and studies nothing.

    None where a filter asks for a gate or a batch size, and on one rank none of a part that takes several.
    """
    filters = context.filters
    if filters.gates or filters.batch_sizes:
        return
    readings = experiment.readings[: 1 if filters.quick else None]
    for reading, place, grid in product(readings, context.places(experiment), experiment.parts):
        is_studied = PARTS[grid.part].is_studied
        if is_studied and place.topology in {p.topology for p in context.places(experiment)[1:]}:
            continue  # no machine matters
        if PARTS[grid.part].least_ranks > 1 and place.size == ONE_RANK:
            continue
        if context.engine == "local" and (is_studied or place.size != ONE_RANK):
            continue
        if is_studied and (filters.quick or context.engine == "cluster"):
            continue
        for workload in workloads(grid, reading, context.suite.seed):
            if not wanted(filters.dtypes, workload.dtype):
                continue
            for system in _systems(grid, filters.systems, context):
                _check_options(workload, system, place.size, f"{context.source}: experiment {experiment.name}")
                yield context.case(
                    experiment, place, system, workload,
                    engine=COUNT if is_studied else None,
                    assumptions={"reading": reading.name},
                    is_default=reading is experiment.readings[0],
                )  # fmt: skip


def workloads(
    grid: PartGrid, reading: PartReading, seed: int = 0
) -> Iterator[PartWorkload | StudyWorkload]:
    """Every combination of a grid's models, routings and sizes; what it leaves open, the reading says."""
    named = {name: size for name, size in reading.sizes.items() if name in PARTS[grid.part].sizes}
    chosen = (grid.models or ("",), grid.dtypes or (reading.dtype,), grid.routings or ("",))
    for model, dtype, routing, batches in product(*chosen, grid.batches or (reading.batches,)):
        for sizes in product(*grid.sizes.values()):
            own = named | dict(zip(grid.sizes, sizes))
            yield workload_of(grid.part, own, model, seed, dtype, routing, batches)


def _check_options(workload: PartWorkload | StudyWorkload, system: str, size: str, where: str) -> None:
    """Refuse options that no machine helps: more slots than there are layers, memory for less than one.

    Raises:
        InputError: which, and what is allowed.
    """
    from moebench.systems.part_registry import check_options

    if isinstance(workload, PartWorkload):
        nodes, _, per_node = size.partition("x")
        try:
            check_options(workload, system, int(nodes) * int(per_node))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None


def _systems(grid: PartGrid, asked: Sequence[str], context: Context) -> list[str]:
    """A grid's own, or those that the filter names: by name those that the grid has of it, with options that one.

    Raises:
        InputError: an option that the system has in no part that runs.
    """
    if not asked:
        return list(grid.systems)
    from moebench.systems.part_interface import parsed

    found = []
    for name in asked:
        if name.partition("+")[0] in PARTS[grid.part].systems:
            try:
                parsed(grid.part, name)
            except InputError:
                if not any(_has(part, name) for part in _parts(context)):
                    raise
                continue
            found += [one for one in grid.systems if name in (one, one.partition("+")[0])] or [name]
    return list(dict.fromkeys(found))


def _parts(context: Context) -> set[str]:
    """Names of the parts of all experiments that run."""
    chosen = chosen_experiments(context.suite, context.filters)
    return {grid.part for one in chosen if isinstance(one, PartExperiment) for grid in one.parts}


def _has(part: str, system: str) -> bool:
    from moebench.systems.part_interface import parsed

    try:
        parsed(part, system)
    except InputError:
        return False
    return True


def check_key(case: Case) -> tuple[Hashable, ...]:
    """Cases of one key are right or wrong together: the check tries a small one."""
    from moebench.systems.part_registry import small_system

    workload, sizes = of_part(case), dict(of_part(case).sizes)
    return workload.part, small_system(workload.part, case.system), sizes.get("products"), sizes.get("top_k")


def refusal(case: Case, topology: Topology) -> tuple[str, str] | None:
    """Why real ranks don't run a case: it has no meaning, or is too large for ranks on CPUs."""
    from moebench.systems.part_interface import TILE_ROWS, parsed
    from moebench.systems.part_registry import burden, problem

    workload = part_of(case)
    if parsed(workload.part, case.system)[0] == "fused":
        return "unsupported", "nobody has the fused kernel that it stands for: it is priced, and not run"
    shape = shape_of(workload)
    reason = problem(workload, case.system, shape, topology.ranks, topology.gpus_per_node, TILE_ROWS)
    if reason is not None:
        return "unsupported", reason
    if topology.hardware.kind == "cpu":
        if (workload.model and workload.dtype == "bf16") or workload.dtype == "tf32":
            is_none = f"{workload.dtype} products are no precision of a CPU"
            return "unsupported", f'{is_none}: give the part dtypes = ["fp32"]'
        held, flops = burden(workload, case.system, topology.ranks) or (
            _held_bytes(case, shape, topology.ranks), _flops(workload, shape, topology.ranks)
        )  # fmt: skip
        if held > CPU_BYTES or flops > CPU_FLOPS:
            return "skipped", (
                f"a rank holds {held / 2**20:,.0f} MiB and computes {flops / 1e9:,.0f} GFLOP; on CPUs the limits are "
                f"{CPU_BYTES // 2**20} MiB and {CPU_FLOPS / 1e9:.0f} GFLOP"
            )
    return None


def _held_bytes(case: Case, shape: DecoderShape | None, ranks: int) -> float:
    """What a rank has before or after a call, whichever is more; about."""
    workload = part_of(case)
    sizes, each = dict(workload.sizes), 4.0 if workload.dtype == "fp32" else 2.0
    if "attention_mb" in sizes:
        copies = ranks if sizes["of_part"] else 1  # of attention, at most
        return (sizes["attention_mb"] * copies + sizes["expert_mb"]) * 1e6 * sizes["sent_percent"] / 100
    if "parameters" in sizes:
        return 4.0 * sizes["parameters"]
    rows = sizes["tokens"] * (sizes["top_k"] / ranks if case.system == "all-to-all" else 1)
    if shape is None:
        return each * rows * sizes["d_model"]
    if "groupedgemm" not in workload.part:
        return each * shape.d_model * (rows / ranks + shape.queries + 2 * shape.keys)
    experts = sizes.get("products", 1) * shape.experts // ranks * shape.d_ffn
    return each * shape.d_model * (rows + experts)


def _flops(workload: PartWorkload, shape: DecoderShape | None, ranks: int) -> float:
    """Of the products of a rank."""
    sizes = dict(workload.sizes)
    if "vocabulary" in sizes:  # of a tied head, forward and backward
        return 6.0 * sizes["tokens"] / ranks * sizes["vocabulary"] * sizes["d_model"]
    if shape is None:
        return 0.0
    rows = workload.size("tokens") / ranks
    if workload.part == "qkv+a2a":
        return 2 * rows * shape.d_model * (shape.queries + 2 * shape.keys)
    if workload.part == "a2a+outproj":
        return 2 * rows * shape.d_model * shape.queries
    products = sizes.get("products", 1)
    return 2 * rows * shape.top_k * products * shape.d_model * shape.d_ffn


def part_of(case: Case) -> PartWorkload:
    """The part of a case that is timed."""
    if not isinstance(case.workload, PartWorkload):
        raise TypeError(f"{case.name} is about a {case.workload.kind} that nobody times")
    return case.workload


def of_part(case: Case) -> PartWorkload | StudyWorkload:
    """The part of a case that is about one."""
    if not isinstance(case.workload, PartWorkload | StudyWorkload):
        raise TypeError(f"{case.name} is about a {case.workload.kind}, not a part")
    return case.workload


def shape_of(workload: PartWorkload) -> DecoderShape | None:
    """The decoder's sizes, where the part has any."""
    if not PARTS[workload.part].of_model:
        return None
    from moebench.workloads.load_decoder import load_decoder

    return load_decoder(workload.model).shape
