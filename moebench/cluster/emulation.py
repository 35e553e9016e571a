"""What `--emulate` and its companions, or a launcher, mean: an engine, a topology, two of its parameters."""

import re

from moebench.cluster.detect import Launched
from moebench.cluster.lab.limits import buffer_problem, rate_problem
from moebench.workloads.errors import InputError
from moebench.workloads.places import EMULATED, THIS_MACHINE, UNSHAPED
from moebench.workloads.units import BYTES, RATE, parse

SHAPED = ("nic.bandwidth", "switch.buffer")  # parameters that an emulated cluster is really given
MOST = 16  # nodes, and ranks of each, as the topologies of this machine have it
SIZE = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)")
# As the kernel's own traffic control writes them: `1gbit`, `512kb`.
_BITS = re.compile(r"([0-9]+\.?[0-9]*)\s*([kmg]?)bit", re.IGNORECASE)
_BUFFER = re.compile(r"([0-9]+\.?[0-9]*)\s*([km]?)b", re.IGNORECASE)


def emulated(
    size: str | None, nic_rate: str | None = None, switch_buffer: str | None = None, unshaped: bool = False
) -> tuple[str | None, dict[str, str]]:
    """Topology and overrides that the options mean; `(None, {})` without any.

    Raises:
        InputError: options that don't fit together, or a quantity that is none.
    """
    given = [("--nic-rate", nic_rate), ("--switch-buffer", switch_buffer), ("--unshaped", unshaped or None)]
    names = [name for name, value in given if value is not None]
    if size is None:
        if names:
            raise InputError(f"{names[0]} is about an emulated cluster: say which with --emulate NODESxRANKS")
        return None, {}
    match = SIZE.fullmatch(size)
    if not match:
        raise InputError(f"--emulate {size}: write NODESxRANKS, such as 2x4: two nodes of four ranks")
    if len(size) > len(f"{MOST}x{MOST}") or max(map(int, match.groups())) > MOST:
        raise InputError(f"--emulate {size}: at most {MOST}x{MOST}, {MOST} nodes of {MOST} ranks")
    if unshaped:
        if len(names) > 1:
            raise InputError(f"--unshaped emulates no network: leave {names[0]} out")
        return f"{size}-{UNSHAPED}", {}
    overrides = {}
    if nic_rate is not None:
        overrides["nic.bandwidth"] = _rate(nic_rate)
    if switch_buffer is not None:
        overrides["switch.buffer"] = _buffer(switch_buffer)
    return f"{size}-{EMULATED}", overrides


def measured(
    place: Launched | None, topology: str | None, engine: str, asked: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """Engine and topologies of a run that has an emulated `topology`, or whose ranks a launcher started.

    Args:
        asked: with --topology.

    Raises:
        InputError: options that don't fit together, or ranks of which nobody says what cluster they are.
    """
    if topology is not None:
        if place is not None:
            raise InputError(f"--emulate starts its own ranks: run it without {place.launcher}")
        if asked:
            raise InputError(f"--emulate is topology {topology}: leave --topology out")
        if engine == "local":
            raise InputError("--emulate starts several ranks: use --engine cluster, or sim to predict them")
        return "cluster" if engine == "auto" else engine, (topology,)
    assert place is not None
    if engine not in ("auto", "cluster"):
        raise InputError(f"--engine {engine} needs no other ranks: run it without {place.launcher}")
    return "cluster", asked or (_own_topology(place),)


def _own_topology(place: Launched) -> str:
    import torch

    if place.nodes > 1 or torch.cuda.is_available():
        raise InputError(
            f"--topology is missing: say what cluster these {place.size} ranks are, by name or by a file of your own"
        )
    return f"{place.size}-{THIS_MACHINE}"


def _rate(text: str) -> str:
    match = _BITS.fullmatch(text.strip())
    written = f"{match[1]} {match[2].upper().replace('K', 'k')}b/s" if match else text
    advice = f"--nic-rate {text}: write a rate such as 1gbit, 200mbit or 25MB/s"
    if problem := rate_problem(8 * _parsed(written, RATE, advice)):
        raise InputError(f"--nic-rate {text}: {problem}")
    return written


def _buffer(text: str) -> str:
    """Kernel style: kb is 1,024 bytes."""
    match = _BUFFER.fullmatch(text.strip())
    written = f"{match[1]} {({'': '', 'k': 'Ki', 'm': 'Mi'})[match[2].lower()]}B" if match else text
    advice = f"--switch-buffer {text}: write a size such as 512kb or 16mb"
    if problem := buffer_problem(_parsed(written, BYTES, advice)):
        raise InputError(f"--switch-buffer {text}: {problem}")
    return written


def _parsed(written: str, dimension: str, advice: str) -> float:
    try:
        return parse(written, dimension, "").si
    except InputError:
        raise InputError(advice) from None
