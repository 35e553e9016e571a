"""`moebench calibrate --emulate` and `--ranks`: measures ranks of this machine into a Hardware and a Topology file.

Two parts. The ranks' work, on one thread each while all of them are busy: what a core does while others use the same
memory. And their exchanges: what a message and a byte cost the processor and the wire, latencies, rates, what the NICs
carry at once. That ranks share cores is no measurement but a quantity of the model (`host.cores`).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moebench.calibrate import PRODUCTS
from moebench.cluster.emulation import MOST, emulated
from moebench.cluster.exchanges import ALL_REDUCE, FLAT, IN_NODE, IN_NODE_ALL_REDUCE, NOTHING
from moebench.cluster.lab import lab_problem
from moebench.cluster.launchers import Launcher, Loopback, in_lab
from moebench.cluster.link_fit import TINY_BYTES, Place, Timed, fit_links, timed
from moebench.cluster.probes import EXCHANGES, WORK, Exchange, ExchangeRequest, Seen, WorkRequest
from moebench.cluster.room import room_problem
from moebench.local.child import usable_cores
from moebench.local.fit import Fit, Range, fit
from moebench.local.machine import cpu_title, machine_title
from moebench.local.machine_file import hardware_text, head, parameter, write_text
from moebench.workloads.errors import InputError
from moebench.workloads.places import EMULATED, HARDWARE, TOPOLOGIES, UNSHAPED, user_folder
from moebench.workloads.units import BYTES, RATE, parse

RANKS_HARDWARE = "this-machine-ranks"
SIZES = tuple(16384 * 8**i for i in range(5))  # 16 KiB to 64 MiB
DTYPES = ("fp32", "bf16")
WORK_BUDGET_S, SAMPLE_S = 0.02, 0.05
STARTS, REPEATS = 3, 3  # ranks started anew differ more than samples of one start
LARGE_S, MIDDLE_S = 0.08, 0.025  # on the wire: well above every latency
SMALLEST_TIMES = 3  # as often as others: they vary most and take least
LOOPBACK_BYTES = 1 << 20
TIMEOUT_S = 600.0

Progress = Callable[[float], None]


@dataclass(frozen=True)
class RankCalibration:
    """What was measured on ranks of this machine.

    Attributes:
        work: of one core while all ranks are busy.
        links: parameters of the topology; timed: the exchanges behind them.
        seconds: it all took.
    """

    work: Fit
    links: Mapping[str, Range]
    timed: Sequence[Timed]
    place: Place
    seconds: float


def place_of(
    emulate: str | None, nic_rate: str | None = None, switch_buffer: str | None = None, ranks: int | None = None
) -> Place:
    """The place that the options of `moebench calibrate` mean.

    Raises:
        InputError: options that don't fit together, or a cluster that this machine can't emulate; says what to do.
    """
    cores = len(usable_cores())
    topology, overrides = emulated(emulate, nic_rate, switch_buffer)
    if (topology is None) == (ranks is None):
        raise InputError("say either --emulate NODESxRANKS or --ranks N")
    if topology is None:
        problem = f"at most {MOST}" if (ranks or 1) > MOST else room_problem(ranks or 1)
        if problem:
            raise InputError(f"--ranks {ranks}: {problem}")
        return Place(1, ranks or 1, cores, None)
    nodes, _, per_node = topology.partition("-")[0].partition("x")
    if int(nodes) * int(per_node) < 2:
        raise InputError("--emulate 1x1 is one rank: measure it with `moebench calibrate` alone")
    problem = room_problem(int(nodes) * int(per_node)) or lab_problem()
    if problem:
        raise InputError(problem)
    rate = parse(overrides.get("nic.bandwidth", "1 Gb/s"), RATE).si
    buffer = parse(overrides.get("switch.buffer", "512 KiB"), BYTES).si
    return Place(int(nodes), int(per_node), cores, rate, int(buffer))


def topology_path(place: Place) -> Path:
    """Where the topology of ranks of this machine is read from."""
    return user_folder(TOPOLOGIES) / f"{UNSHAPED if place.nic_bytes_per_s is None else EMULATED}.toml"


@contextmanager
def ranks_of(place: Place) -> Iterator[Launcher]:
    """The ranks of a place, for as long as the block lasts.

    Raises:
        LabError: the emulated cluster could not be built.
    """
    if place.nic_bytes_per_s is None:
        yield Loopback(place.ranks)
        return
    with in_lab(place.nodes, place.ranks_per_node, 8 * place.nic_bytes_per_s, place.switch_buffer_bytes) as launcher:
        yield launcher


def calibrate_ranks(
    place: Place,
    progress: Progress = lambda share: None,
    dtypes: Sequence[str] = DTYPES,
    passes: int = 2,
    work: Fit | None = None,
) -> RankCalibration:
    """Measure ranks of this machine.

    Args:
        work: what is known of the cores already; else it is measured here.

    Raises:
        moebench.ranks.run.RanksError: a rank failed.
        moebench.cluster.lab.LabError: the emulated cluster could not be built.
    """
    start = time.monotonic()
    with ranks_of(place) as launcher:
        if work is None:
            work = measure_work(launcher, dtypes, passes)
        progress(0.7)
        found = time_exchanges(launcher, place, probes(place))
    progress(1.0)
    links = fit_links(found, place, work.parameters["host.issue.collective"].value)
    return RankCalibration(work, links, found, place, time.monotonic() - start)


def measure_work(launcher: Launcher, dtypes: Sequence[str] = DTYPES, passes: int = 2) -> Fit:
    """What one core does for a rank while all ranks are busy; every rank of every pass is a repeat."""
    request = WorkRequest(SIZES, PRODUCTS, tuple(dtypes), passes, WORK_BUDGET_S)
    reports = launcher.run(WORK, (request,), TIMEOUT_S)
    return fit(message for report in reports for message in report)


def time_exchanges(
    launcher: Launcher, place: Place, exchanges: Sequence[Exchange], repeats: int = REPEATS, starts: int = STARTS
) -> list[Timed]:
    """Time exchanges on the ranks of a launcher, `repeats` times in each of `starts` starts of the ranks."""
    request = ExchangeRequest(tuple(exchanges), place.ranks_per_node, repeats, SAMPLE_S, launcher.counters)
    reports: list[list[Seen]] = [[] for _ in range(place.ranks)]
    for _ in range(starts):
        for report, seen in zip(reports, launcher.run(EXCHANGES, (request,), TIMEOUT_S), strict=True):
            report += seen
    return timed(exchanges, reports)


def probes(place: Place) -> list[Exchange]:
    """The exchanges that the parameters are fitted to: the smallest, and large ones."""
    tiny = TINY_BYTES // 4
    found = [Exchange(NOTHING, 4)]
    found += SMALLEST_TIMES * [Exchange(FLAT, tiny), Exchange(ALL_REDUCE, tiny)]
    sizes = [bytes_for(place, seconds) for seconds in (MIDDLE_S, LARGE_S)]
    found += [Exchange(FLAT, size) for size in dict.fromkeys(sizes)]
    if place.nodes > 1 and place.ranks_per_node > 1:
        found += SMALLEST_TIMES * [Exchange(IN_NODE, tiny), Exchange(IN_NODE_ALL_REDUCE, tiny)]
        found.append(Exchange(IN_NODE, LOOPBACK_BYTES // 4))
    return found


def bytes_for(place: Place, seconds: float) -> int:
    """Bytes from each rank to each other whose exchange takes about that long on the NICs."""
    if place.nodes == 1 or place.nic_bytes_per_s is None:
        return LOOPBACK_BYTES
    crossing = place.ranks_per_node * (place.ranks - place.ranks_per_node)
    return max(TINY_BYTES, int(seconds * place.nic_bytes_per_s / crossing) // 64 * 64)


def hardware_toml(calibration: RankCalibration) -> str:
    """The Hardware file: one core, while all ranks are busy."""
    place = calibration.place
    return hardware_text(
        calibration.work,
        "A core of this machine under a rank of several, as `moebench calibrate --emulate` (or --ranks) measured it.",
        f"{machine_title(1)} a rank",
        (
            f"measured in processor time while {place.ranks} ranks were busy on {place.cores} cores: what they take "
            "from each other on the way to memory is in it, waiting for a core is not (topology: host.cores)",
            "freed memory is kept by the process, so that page faults are not in these numbers",
        ),
        f"moebench calibrate on {place.ranks} ranks, {cpu_title()}",
        place.ranks,
    )


def topology_toml(calibration: RankCalibration, hardware: str = RANKS_HARDWARE) -> str:
    """The Topology file; `hardware` is a name or a file beside it."""
    place = calibration.place
    size = f"{place.nodes}x{place.ranks_per_node}"
    source = f"moebench calibrate on {size} ranks, {cpu_title()}"
    lines = head(
        "Ranks of this machine, as `moebench calibrate` measured them; run it again to replace the file.",
        "ranks of this machine, measured: gloo over TCP",
        (f"measured as {size}", "measures gloo over TCP on the cores of one computer: it says nothing about GPUs"),
    )
    is_one_node = place.nodes == 1 and place.nic_bytes_per_s is not None  # whose NIC carried nothing
    lines[3:3] = [
        f'hardware = "{hardware}"', f"gpus_per_node = {MOST}", f"max_nodes = {1 if is_one_node else MOST}",
        "nics_per_node = 1", 'link_kind = "shared-memory"', f'sizes = ["{size}"]',
    ]  # fmt: skip
    links = dict(calibration.links)
    if place.nic_bytes_per_s is not None:
        asked = {"nic.bandwidth": place.nic_bytes_per_s, "switch.buffer": place.switch_buffer_bytes}
        for name, value in asked.items():
            lines += parameter(name, _exactly(value), "what the emulated cluster is given", "datasheet")
    else:  # nodes by name only: the same loopback between them as inside
        links |= {f"nic.{what}": links[f"link.{what}"] for what in ("bandwidth", "latency", "message")}
        links["fabric.share"] = _exactly(1.0)
    for name, found in links.items():
        lines += parameter(name, found, source, "datasheet" if name == "host.cores" else "measured")
    return "\n".join(lines)


def _exactly(value: float) -> Range:
    return Range(value, value, value)


def write_machine(calibration: RankCalibration, output: Path | None = None) -> tuple[Path, Path]:
    """Write both files; where the topology goes elsewhere, its hardware goes beside it."""
    path = output or topology_path(calibration.place)
    if output is None:
        hardware, name = user_folder(HARDWARE) / f"{RANKS_HARDWARE}.toml", RANKS_HARDWARE
    else:
        hardware = path.with_name(f"{path.stem}-hardware.toml")
        name = f"./{hardware.name}"
    write_text(hardware_toml(calibration), hardware)
    write_text(topology_toml(calibration, name), path)
    return path, hardware
