"""`moebench record-routing`: the logits of a router into a file that suites impose on every system."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moebench.cli.paths import OutputFile
from moebench.workloads.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


@click.command()
@click.option("--gate", metavar="LABEL", help="The router of a small layer that is trained here with this rule.")
@click.option("--experts", type=click.IntRange(1, 4096), metavar="E", help="Of that layer.")
@click.option("--steps", type=click.IntRange(0, 10_000), metavar="N", help="Of its training; default 120.")
@click.option(
    "--router",
    metavar="FILE|MODULE:OBJECT",
    help="A router's weight [E, D] in a file (safetensors, PyTorch, NumPy), or what gives logits [T, E], to import.",
)
@click.option("--key", metavar="NAME", help="Name of the weight in the file, where several may be meant.")
@click.option("--hidden", type=click.Path(path_type=Path), metavar="FILE", help="Hidden states [N, D] of real tokens.")
@click.option("--hidden-key", metavar="NAME", help="Their name in that file.")
@click.option("--d-model", type=click.IntRange(1), metavar="D", help="Width of tokens, where nothing else says it.")
@click.option("--tokens", type=click.IntRange(1, 1 << 24), metavar="T", help="How many; default all, or 4096.")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, help="Of all that is drawn; default 0.")
@click.option("-o", "output", type=OutputFile(), required=True, help="File to write, .npz.")
def command(
    gate: str | None, experts: int | None, steps: int | None, router: str | None, key: str | None, hidden: Path | None,
    hidden_key: str | None, d_model: int | None, tokens: int | None, seed: int, output: Path,
) -> None:  # fmt: skip
    """Record what a router says of each token: of one of moebench's rules (--gate), or of your model (--router).

    A suite takes the file with `routing = { kind = "trace", path = "./FILE.npz" }` in its [experiments.layer].
    """
    from moebench.imports import routing
    from moebench.imports.write import write_checked
    from moebench.workloads.validate import validate

    if output.suffix != ".npz":
        raise InputError(f"-o {output}: a recorded routing is a .npz file")
    if (gate is None) == (router is None):
        raise InputError("say either --gate LABEL with --experts, or --router")
    if gate is not None:
        given = {"--key": key, "--hidden": hidden, "--hidden-key": hidden_key, "--d-model": d_model}
        _refuse_given(given, "--gate")
        if experts is None:
            raise InputError("--experts is missing: of the layer that is trained")
        found = routing.of_gate(gate, experts, tokens or routing.TOKENS, 120 if steps is None else steps, seed)
    else:
        _refuse_given({"--experts": experts, "--steps": steps}, "--router")
        found = routing.of_router(str(router), tokens, hidden, seed, key, hidden_key, d_model)
    click.echo(write_checked(output, lambda scratch: routing.write(found, scratch), validate))
    click.echo(_load(found.logits_TE))


def _refuse_given(given: Mapping[str, object], beside: str) -> None:
    for option, value in given.items():
        if value is not None:
            raise InputError(f"{option} has no meaning beside {beside}")


def _load(logits_TE: "Tensor") -> str:
    """How even the first choices are."""
    from moebench.kernels.explicit import count

    tokens, experts = logits_TE.shape
    if not tokens:
        return "no tokens"
    counts_E = count(logits_TE.argmax(dim=1), experts)
    busiest = float(counts_E.max()) * experts / tokens
    unwanted = int((counts_E == 0).sum())
    return f"first choices: the busiest expert has {busiest:.2f} times the mean, {unwanted} of {experts} have none"
