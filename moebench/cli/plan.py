"""`moebench plan`: which parallel setting trains a model fastest on a cluster, and why not the others."""

from typing import TYPE_CHECKING

import click

from moebench.workloads.errors import InputError

if TYPE_CHECKING:
    from moebench.planner.space import Question


@click.command()
@click.argument("model")
@click.option("--topology", required=True, metavar="T", help="What it runs on: 4x8-h800, or a file.")
@click.option("--batch", required=True, type=int, metavar="N", help="Sequences of a step, of all GPUs together.")
@click.option("--sequence", type=click.IntRange(1, 2**24), metavar="N", help="Tokens of one; default as the model's.")
@click.option(
    "--system", "systems", multiple=True, metavar="S",
    help="Who trains; repeatable. A name alone stands for all of its options that are worth trying, a name with "
    "options (NAME+overlap=none) for these. Default the first system for jobs.",
)  # fmt: skip
@click.option("--stages", multiple=True, type=int, metavar="N", help="Only pipelines of so many stages; repeatable.")
@click.option("--chunks", multiple=True, type=int, metavar="N", help="Only so many chunks a stage; repeatable.")
@click.option("--micro-batch", multiple=True, type=int, metavar="N", help="Default 1, 2, 4 and 8 sequences.")
@click.option("--dtype", default="bf16", show_default=True, metavar="D", help="Of parameters and rows.")
@click.option("--set", "sets", multiple=True, metavar="PARAMETER=VALUE", help="What if: nic.bandwidth=25GB/s.")
@click.option(
    "--samples", default=128, show_default=True, type=click.IntRange(0, 4096), metavar="N",
    help="Draws of the machine's uncertain parameters, which say how far the order is decided.",
)  # fmt: skip
@click.option("--seed", default=0, type=click.IntRange(0, 2**32 - 1), metavar="N", help="Of the draws.")
@click.option("--exhaustive", is_flag=True, help="Compose those settings too that can't be best.")
@click.option("--top", default=12, show_default=True, type=click.IntRange(1), help="Settings to list.")
@click.option("--rejected", is_flag=True, help="List every setting that can't run, with the reason.")
@click.option("--dry-run", is_flag=True, help="Count settings, and stop before anything is traced.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output, all settings in it.")
def command(
    model: str,
    topology: str,
    batch: int,
    sequence: int | None,
    systems: tuple[str, ...],
    stages: tuple[int, ...],
    chunks: tuple[int, ...],
    micro_batch: tuple[int, ...],
    dtype: str,
    sets: tuple[str, ...],
    samples: int,
    seed: int,
    exhaustive: bool,
    top: int,
    rejected: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Rank the ways to train MODEL in parallel: ranks that share a layer, pipeline stages and their chunks, replicas,
    micro-batches, and the options of the system.

    MODEL is a model's name (`moebench list models`) or file. Times are simulated; a setting that does not fit says
    which rank lacks how much memory for what.
    """
    from dataclasses import replace

    from moebench.cli import plan_text
    from moebench.cli.tables import print_json
    from moebench.planner.space import MICRO_BATCHES, Question
    from moebench.systems.job_registry import NAMES
    from moebench.workloads.load_decoder import load_decoder

    decoder = load_decoder(model)
    question = Question(
        decoder if sequence is None else replace(decoder, sequence=sequence),
        _machine(topology, sets),
        systems or NAMES[:1],
        batch,
        stages,
        chunks,
        micro_batch or MICRO_BATCHES,
        dtype,
    )
    question.check()
    if dry_run:
        counts, line = plan_text.counted(question)
        print_json(counts) if as_json else click.echo(line)
        return
    document, lines = _answered(question, samples, seed, exhaustive, (top, rejected))
    if as_json:
        print_json(document)
        return
    for line in lines:
        click.echo(line)


def _machine(name: str, sets: tuple[str, ...]):  # type: ignore[no-untyped-def]
    from moebench.cases.plan import Machines
    from moebench.cli.run import settings_of

    return Machines(settings_of(sets))(name)


def _answered(
    question: "Question", samples: int, seed: int, is_exhaustive: bool, shown: tuple[int, bool]
) -> tuple[dict, list[str]]:
    """The plan as a document, and as text."""
    from moebench.cli import plan_text
    from moebench.cli.progress import ProgressBar
    from moebench.planner.checks import checked, trial_names
    from moebench.planner.exact import settled
    from moebench.planner.search import search
    from moebench.sim.uncertainty import draw

    values = draw(question.topology.parameters(), samples, seed)
    with ProgressBar() as progress:
        progress.phase("correctness", 1)
        status = checked(question.systems)
        progress.step(f"{len(trial_names(question.systems))} settings of a small model")
        if status.status != "passed":
            raise InputError(f"no setting is ranked, one is {status.status}: {status.reason}")
        found = settled(search(question, values, progress, is_exhaustive), values, progress)
    return plan_text.document(found), plan_text.lines(found, *shown)
