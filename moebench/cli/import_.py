"""`moebench import`: other tools' files into files that suites can name."""

from pathlib import Path

import click

from moebench.cli.paths import OutputFile
from moebench.workloads.errors import InputError


@click.group()
def command() -> None:
    """Turn a model's config.json, or logs of nccl-tests, into files of moebench."""


@command.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--name", metavar="NAME", help="What the model is called; default as the config or its folder is.")
@click.option("-o", "output", type=OutputFile(), help="File to write; default NAME.toml, here.")
def model(config: Path, name: str | None, output: Path | None) -> None:
    """Write a model file from CONFIG, the config.json of a Hugging Face model.

    It says what one MoE layer of the model is; `model = "./NAME.toml"` in a suite's [experiments.layer] takes it.
    """
    from moebench.imports.model_config import import_model
    from moebench.imports.write import slug, write_checked
    from moebench.workloads.validate import validate

    found = import_model(config, name)
    path = output or Path(f"{slug(found.name)}.toml")
    click.echo(write_checked(path, lambda scratch: scratch.write_text(found.text, encoding="utf-8"), validate))
    if found.unread:
        click.echo(f"not read, as it says nothing that a model file has: {', '.join(found.unread)}", err=True)


@command.command()
@click.argument("logs", nargs=-1, required=True, metavar="LOG...", type=click.Path(path_type=Path))
@click.option("--like", required=True, metavar="NODE_TYPE", help="Node type of the same GPUs, which the file extends.")
@click.option("--collective", metavar="NAME", help="What the logs time, if they don't say: alltoall, all_reduce, ...")
@click.option("--size", metavar="NODESxGPUS", help="On how many GPUs, where the logs don't say: 2x8.")
@click.option("--title", metavar="TEXT", help="What the cluster is called.")
@click.option("-o", "output", type=OutputFile(), help="File to write; default named as the first log, here.")
def topology(
    logs: tuple[Path, ...], like: str, collective: str | None, size: str | None, title: str | None, output: Path | None
) -> None:
    """Write a topology file from the output of nccl-tests (alltoall_perf, all_reduce_perf, ...).

    Logs of one node say how fast its links are, logs of several nodes how fast NICs and fabric are; give both where you
    have them. What they don't say stays as NODE_TYPE has it. `run --topology FILE` takes the file.
    """
    from moebench.imports.nccl_log import read_log
    from moebench.imports.topology import import_topology
    from moebench.imports.write import slug, write_checked
    from moebench.workloads.validate import validate

    read = [read_log(log, collective, _size(size)) for log in logs]
    found = import_topology(read, like, title)
    path = output or Path(f"{slug(logs[0].stem)}.toml")
    click.echo(write_checked(path, lambda scratch: scratch.write_text(found.text, encoding="utf-8"), validate))
    for log, mean, most in found.errors:
        sizes = f"{log.collective} on {log.nodes}x{log.gpus_per_node}, {len(log.points)} sizes"
        click.echo(f"{log.path}: {sizes}; the network model with these links is off by {mean:.1%}, at most {most:.1%}")


def _size(text: str | None) -> tuple[int, int] | None:
    from moebench.workloads.schema import SIZE

    if text is None:
        return None
    match = SIZE.fullmatch(text)
    if match is None:
        raise InputError(f"--size {text!r} is not a size: write NODESxGPUS such as 2x8")
    return int(match[1]), int(match[2])
