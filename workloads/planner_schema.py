"""What a suite file says of an experiment that searches for the fastest parallel setting, as strict models."""

from typing import Annotated, Any, Literal

from pydantic import Field

from moebench.workloads.experiment_schema import Described, SystemName
from moebench.workloads.job import JOB_DTYPES
from moebench.workloads.job_schema import Count, Counts, ModelName
from moebench.workloads.schema import Name, Size, choice
from moebench.workloads.suite import PlannerExperiment
from moebench.workloads.toml_file import TomlFile


class PlannerExperimentFile(Described):
    """Every parallel setting of some systems for some decoders, ranked by the time of a step."""

    kind: Literal["planner"]
    metric: Annotated[str, choice("metric", ("iteration_time",))] = "iteration_time"
    systems: Annotated[list[SystemName], Field(min_length=1)]
    models: Annotated[list[ModelName], Field(min_length=1)]
    sizes: Annotated[list[Size], Field(min_length=1)]
    node_types: Annotated[list[Name], Field(min_length=1)]
    global_batch: Count
    micro_batches: Counts = Field(default_factory=lambda: [1, 2, 4, 8])
    dtype: Annotated[str, choice("dtype", JOB_DTYPES)] = "bf16"
    figure: None = None


def planner_experiment(
    model: PlannerExperimentFile, common: dict[str, Any], file: TomlFile, index: int
) -> PlannerExperiment:
    """The experiment of a file.

    Raises:
        InputError: a model that has no decoder; names file, line and key.
    """
    from moebench.workloads.load_decoder import load_decoder

    for name in model.models:
        load_decoder(name, file.where(["experiments", index, "models"]), file.path.parent)
    return PlannerExperiment(
        **common,
        systems=tuple(dict.fromkeys(model.systems)),
        models=tuple(dict.fromkeys(model.models)),
        global_batch=model.global_batch,
        micro_batches=tuple(dict.fromkeys(model.micro_batches)),
        dtype=model.dtype,
    )
