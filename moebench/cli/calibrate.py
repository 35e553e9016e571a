"""`moebench calibrate`: measure this machine into a hardware file."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from moebench.cli.paths import OutputFile
from moebench.workloads.errors import InputError
from moebench.workloads.places import this_machine_hardware_path

if TYPE_CHECKING:
    from moebench.calibrate import Progress as Heard

Measured = TypeVar("Measured")

SHOWN = (
    ("products, fp32", "gpu.peak.fp32"),
    ("products, bf16", "gpu.peak.bf16"),
    ("memory, best rate", "gpu.memory.bandwidth"),
    ("issue of an operator", "host.issue.operator"),
    ("issue of a custom operator", "host.issue.custom"),
    ("blocking read", "host.sync"),
)


@click.command()
@click.option(
    "-o",
    "output",
    type=OutputFile(),
    help="File to write; default: the one that `this-machine` names, or `emulated`, or `unshaped`.",
)
@click.option("--emulate", metavar="NODESxRANKS", help="Measure ranks of an emulated cluster, and its network: 2x2.")
@click.option("--nic-rate", metavar="RATE", help="Rate of its NICs, such as 200mbit; 1gbit unless said.")
@click.option("--switch-buffer", metavar="SIZE", help="Buffer of a port of its switch; 512kb unless said.")
@click.option("--ranks", type=click.IntRange(2), metavar="N", help="Measure N ranks over loopback.")
def command(
    output: Path | None, emulate: str | None, nic_rate: str | None, switch_buffer: str | None, ranks: int | None
) -> None:
    """Measure this machine's processor: products, memory, issue cost.

    Takes 2 to 6 minutes, by machine; keep it idle meanwhile. `1x1-this-machine` then names it as a topology: one rank
    with a thread on each core that this process may use (`taskset -c 0 moebench calibrate` measures one core).

    With --emulate or --ranks: what ranks of this machine do, all of them busy at once, and their exchanges; they name
    the topologies NxG-emulated or 1xN-unshaped.
    """
    if emulate or ranks or nic_rate or switch_buffer:
        _calibrate_ranks(output, emulate, nic_rate, switch_buffer, ranks)
        return
    from moebench.calibrate import calibrate, write_hardware
    from moebench.local.child import ChildFailed

    path = output or this_machine_hardware_path()
    _refuse_unwritable(path)
    try:
        calibration = _with_progress(calibrate)
        write_hardware(calibration, path)
    except ChildFailed as error:
        raise click.ClickException(f"calibration stopped: {error}") from error
    except OSError as error:
        raise InputError(f"{path}: can't write: {error.strerror}") from error
    click.echo(f"measured {calibration.threads} threads in {calibration.seconds:.0f} s; written to {path}")
    _show(path)


def _calibrate_ranks(
    output: Path | None, emulate: str | None, nic_rate: str | None, switch_buffer: str | None, ranks: int | None
) -> None:
    from moebench.calibrate_ranks import calibrate_ranks, place_of, topology_path, write_machine
    from moebench.cluster.lab import LabError
    from moebench.ranks.run import RanksError

    place = place_of(emulate, nic_rate, switch_buffer, ranks)
    path = output or topology_path(place)
    _refuse_unwritable(path)
    try:
        calibration = _with_progress(lambda heard: calibrate_ranks(place, heard))
        topology, hardware = write_machine(calibration, output)
    except (RanksError, LabError) as error:
        raise click.ClickException(f"calibration stopped: {error}") from error
    except OSError as error:
        raise InputError(f"{path}: can't write: {error.strerror}") from error
    click.echo(f"measured {place.ranks} ranks in {calibration.seconds:.0f} s; written to {topology} and {hardware}")
    _show_links(topology)


def _show_links(path: Path) -> None:
    from moebench.workloads.load import load_topology

    topology = load_topology(str(path))
    click.echo(topology.title)
    for name, p in {**topology.hardware.parameters, **topology.link_parameters}.items():
        if name in topology.link_parameters or name in (shown for _, shown in SHOWN):
            value, low, high = (number / p.scale for number in (p.value, p.low, p.high))
            click.echo(f"  {name:28} {value:8.4g} {p.unit:8} ({low:.4g} to {high:.4g})")


def _refuse_unwritable(path: Path) -> None:
    """An unwritable place is an error before the measurement, not after it; nothing is left behind either way."""
    made = [folder for folder in path.parents if not os.path.lexists(folder)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(path.name + ".partial")
        scratch.touch()
        scratch.unlink()
    except OSError as error:
        raise InputError(f"{path}: can't write: {error.strerror}") from error
    finally:
        for folder in made:
            with suppress(OSError):  # never made, or no longer empty
                folder.rmdir()


def _with_progress(measure: "Callable[[Heard], Measured]") -> "Measured":
    """Run `measure(progress)` and tell standard error how far it is."""
    from moebench.cli.progress import Share

    with Share("calibrating") as share:
        return measure(share)


def _show(path: Path) -> None:
    from moebench.workloads.load import load_hardware

    hardware = load_hardware(str(path) if path != this_machine_hardware_path() else "this-machine")
    click.echo(hardware.title)
    for title, name in SHOWN:
        p = hardware.parameters[name]
        value, low, high = (number / p.scale for number in (p.value, p.low, p.high))
        click.echo(f"  {title:28} {value:8.4g} {p.unit:8} ({low:.4g} to {high:.4g})")
