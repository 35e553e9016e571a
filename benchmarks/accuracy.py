"""docs/accuracy.md: how far the simulator is from what was measured, written from results/measured/*.csv.

    python -m benchmarks.accuracy

Everything on the page comes from those files, so that it can be written again without measuring.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from benchmarks import calibration_repeats, lancet_results, nccl_tables, ring_results, simgrid_check
from benchmarks.calibration_repeats import Repeat
from benchmarks.rows_csv import read_rows
from benchmarks.validation_results import (
    EXCHANGE,
    FEWEST,
    MEDIAN_AIM,
    NINTH_AIM,
    OVERLAP,
    PAIR_AIM,
    PAIR_DIFFERENCE,
    STEP,
    Judgement,
    Result,
    judge,
)

FOLDER = Path("results/measured")
PAGE, SCATTER = Path("docs/accuracy.md"), Path("docs/images/accuracy.svg")
_KINDS = {STEP: "training steps", EXCHANGE: "exchanges by themselves"}


def write_page() -> Path:
    """Write the page and its figure; the page's path."""
    results, repeats = measured()
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    if results:
        draw_scatter([r for those in results.values() for r in those], SCATTER)
    PAGE.write_text(page(results, repeats))
    return PAGE


def page(results: Mapping[str, list[Result]], repeats: Mapping[str, list[Repeat]] | None = None) -> str:
    """The page's text."""
    parts = [_INTRODUCTION]
    for machine, those in results.items():
        parts += [f"## Ranks on {machine}", summary(judge(those)), _figure(), *_tables(those)]
        if found := (repeats or {}).get(machine):
            parts += ["### Does a calibration repeat?", calibration_repeats.markdown(found)]
    parts += [*_whole_models(), *_rings(), _nccl(), _simgrid(), _READING]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def measured() -> tuple[dict[str, list[Result]], dict[str, list[Repeat]]]:
    """The validations that were measured, and how their calibrations repeat, by machine."""
    files = {path.stem.removeprefix("validation-"): path for path in sorted(FOLDER.glob("validation-*.csv"))}
    results = {machine: read_rows(Result, path) for machine, path in files.items()}
    return results, {machine: _repeats(path) for machine, path in files.items()}


def _repeats(validation: Path) -> list[Repeat]:
    path = calibration_repeats.path_beside(validation)
    return read_rows(Repeat, path) if path.exists() else []


def summary(j: Judgement) -> str:
    """The aims, and whether they are met."""
    pairs = f"{j.named_right} of {j.pairs}" if j.pairs else "no pair differs so much"
    rows = [
        ("cases that the processors do not hold up", f"at least {FEWEST}", f"{j.cases}", j.cases >= FEWEST),
        ("median absolute error of the time", f"at most {_percent(MEDIAN_AIM)}", _percent(j.median),
         j.median <= MEDIAN_AIM),
        ("nine in ten cases within", _percent(NINTH_AIM), f"{_percent(j.ninth)}", j.ninth <= NINTH_AIM),
        (f"faster of two systems that differ by more than {_percent(PAIR_DIFFERENCE)}",
         f"right in {_percent(PAIR_AIM)}", pairs, not j.pairs or j.named_right >= PAIR_AIM * j.pairs),
        ("bytes and messages of a step equal to the ranks' own counts", "all", f"{j.counts_equal} of {j.counted}",
         j.counts_equal == j.counted),
    ]  # fmt: skip
    lines = ["| aim | | found | |", "|---|---|---|---|"]
    lines += [f"| {name} | {aim} | {found} | {'met' if met else '**missed**'} |" for name, aim, found, met in rows]
    excluded = f"{j.excluded} more cases are bound by the computer's cores, not by its network: shown, not judged."
    return "\n".join([*lines, "", excluded])


def _figure() -> str:
    return f"![Predicted against measured time of every case]({SCATTER.relative_to(PAGE.parent)})"


def _tables(results: Sequence[Result]) -> list[str]:
    parts = []
    for kind, title in _KINDS.items():
        those = [r for r in results if r.kind == kind]
        if those:
            parts += [f"### {title.capitalize()}", _by_size(those), _table(those)]
    beside = [r for r in results if r.kind == OVERLAP]
    if beside:
        parts += ["### Exchanges beside matrix products", _overlap(results)]
    return parts


def _by_size(results: Sequence[Result]) -> str:
    """Which way the errors go on each cluster; the cases that cores bind stand apart."""
    lines = ["| size | judged | middle error | from | to | bound by cores | middle error |", "|" + "---|" * 7]
    for size in dict.fromkeys(r.size for r in results):
        judged = [r.error for r in results if r.size == size and not r.cpu_bound]
        bound = [r.error for r in results if r.size == size and r.cpu_bound]
        cells = [_signed(of(judged)) if judged else "" for of in (median, min, max)]
        cells += [str(len(bound)), _signed(median(bound)) if bound else ""]
        lines.append(f"| {size} | {len(judged)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _table(results: Sequence[Result]) -> str:
    lines = [
        "| case | predicted ms | measured ms | error | waiting ms, both | peak MiB, both | cores, wire busy | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        waits = f"{1e3 * r.predicted_exposed_s:.1f}, {_ms(r.measured_exposed_s)}"
        mebi = 2**20
        peak = f"{r.predicted_peak_bytes / mebi:.1f}, {r.measured_peak_bytes / mebi:.1f}"
        lines.append(
            f"| {r.point}/{r.system} | {_interval(r.predicted_s, r.predicted_low_s, r.predicted_high_s)} "
            f"| {_interval(r.measured_s, r.measured_low_s, r.measured_high_s)} | {_signed(r.error)} | {waits} "
            f"| {peak if r.kind == STEP else ''} | {_percent(r.cpu_share, 0)}, {_percent(r.wire_share, 0)} "
            f"| {'cores' if r.cpu_bound else ''} |"
        )
    return "\n".join(lines)


def _overlap(results: Sequence[Result]) -> str:
    """Exchange alone, products alone, both: predicted and measured, and how much of the shorter part is hidden."""
    lines = [
        "| size, bytes to each peer | products | exchange ms | products ms | both, predicted ms | measured | hidden |",
        "|---|---|---|---|---|---|---|",
    ]
    by_name = {(r.point, r.system): r for r in results if r.kind != STEP}
    for (point, system), both in by_name.items():
        kind, _, count = system.partition(" ")
        if kind != "beside":
            continue
        exchange, products = by_name[point, "flat"], by_name[point, f"products {count}"]
        shorter = min(exchange.measured_s, products.measured_s)
        hidden = (exchange.measured_s + products.measured_s - both.measured_s) / shorter
        lines.append(
            f"| {both.size}, {point.split('/')[1]} | {count} | {_ms(exchange.measured_s)} | {_ms(products.measured_s)} "
            f"| {_ms(both.predicted_s)} | {_ms(both.measured_s)} | {_percent(hidden, 0)} |"
        )
    return "\n".join([*lines, "", _OVERLAP_READING])


def _nccl() -> str:
    if not nccl_tables.CSV.exists():
        return "## NVIDIA's NCCL tables\n\nNot run: `python -m benchmarks.nccl_tables`."
    found = read_rows(nccl_tables.HeldOut, nccl_tables.CSV)
    average = mean(r.mean for r in found)
    above = [f"{r.system} with {r.gpus} GPUs ({_percent(r.mean)})" for r in found if r.mean > nccl_tables.AIM]
    met = "met" if average <= nccl_tables.AIM else "missed"
    missed = f" Above it: {', '.join(above)}." if above else ""
    return (
        f"## NVIDIA's NCCL tables\n\n{_NCCL_READING.strip()}\n\nMean error {_percent(average)} over {len(found)} "
        f"tables; the aim is {_percent(nccl_tables.AIM)}: {met}.{missed}{_WHY_ABOVE if above else ''}\n\n"
        f"{nccl_tables.markdown(found)}"
    )


def _whole_models() -> list[str]:
    """A section a machine on which a whole model was trained with and without overlap."""
    parts: list[str] = []
    for path in sorted(FOLDER.glob("lancet-*.csv")):
        title = f"## A whole model: Lancet beside RAF on {path.stem.removeprefix('lancet-')}"
        parts += [title, _WHOLE_MODELS, lancet_results.markdown(lancet_results.read(path))]
    return parts


def _rings() -> list[str]:
    """A section a machine on which generation ran with experts in ring memory."""
    parts: list[str] = []
    for path in sorted(FOLDER.glob("ring-*.json")):
        title = f"## Ring memory: generation with experts on disk on {path.stem.removeprefix('ring-')}"
        parts += [title, _RINGS, ring_results.markdown(ring_results.read(path))]
    return parts


def _simgrid() -> str:
    if not simgrid_check.CSV.exists():
        return "## SimGrid\n\nNot run: `python -m benchmarks.simgrid_check`."
    found = read_rows(simgrid_check.Compared, simgrid_check.CSV)
    worst = max(abs(c.error) for c in found)
    met = "met" if worst <= simgrid_check.AIM else "missed"
    return (
        "## SimGrid\n\nGPUs behind one NIC, and uneven traffic, against a flow simulation that shares every link "
        f"moment by moment. Largest difference {_percent(worst, 2)}; the aim is "
        f"{_percent(simgrid_check.AIM)}: {met}.\n\n"
        + simgrid_check.markdown(found)
    )


def draw_scatter(results: Sequence[Result], path: Path) -> None:
    """Predicted against measured, both logarithmic, with the band of the nine-in-ten aim."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "moebench"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.add_subplot()
    shown = [r for r in results if r.kind != OVERLAP]
    sizes = list(dict.fromkeys(r.size for r in shown))
    for number, size in enumerate(sizes):
        for bound, marker in ((False, "o"), (True, "x")):
            those = [r for r in shown if r.size == size and r.cpu_bound == bound]
            label = f"{size}{', cores' if bound else ''}"
            axes.scatter(
                [1e3 * r.measured_s for r in those], [1e3 * r.predicted_s for r in those],
                marker=marker, s=24, color=f"C{number}", label=label if those else None,
            )  # fmt: skip
    ends = [1e3 * f(r.measured_s for r in shown) for f in (min, max)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(ends, [e * (1 - NINTH_AIM) for e in ends], [e * (1 + NINTH_AIM) for e in ends], alpha=0.15)
    axes.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="predicted ms")
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def _interval(value_s: float, low_s: float, high_s: float) -> str:
    return f"{_ms(value_s)} ({_ms(low_s)} to {_ms(high_s)})"


def _ms(seconds: float) -> str:
    return "" if seconds != seconds else f"{1e3 * seconds:.1f}"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _percent(share: float, digits: int = 1) -> str:
    if share != share:
        return "-"
    text = f"{100 * share:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} %"


_INTRODUCTION = """
# How far the simulator can be believed

Engine `sim` replays a program that was recorded operator by operator on a described machine. This page puts its times
beside measured ones. It is written by `python -m benchmarks.validation`, which calibrates, predicts, runs and compares;
`python -m benchmarks.accuracy` writes it again from `results/measured/`.

What is measured here is gloo over TCP between processes of one computer: nodes are network namespaces, each with one
NIC of a given rate. So the page checks the machinery that every prediction goes through (the trace, the operators'
costs, shared NICs, messages, waiting, overlap), never a GPU's own numbers. Those rest on public tables, below and in
the hardware files.

**What is calibrated and what is predicted.** `moebench calibrate` measures matrix products, memory-bound operators and
issue costs on ranks that are busy at once, and a few bare exchanges for each cluster. Layers, their gates, batch sizes
and exchanges of other sizes are predicted. Nothing is fitted to a step's time.
"""

_OVERLAP_READING = """
*Hidden*: the share of the shorter part that disappears behind the longer one. What does not disappear is the processor
time that sending costs where ranks keep all cores busy; the model adds it to the work beside the exchange.
"""

_WHOLE_MODELS = """
Written by `python -m benchmarks.lancet_measured`. The simulator is given the plans that the ranks ran. This validates
the passes and the simulator; it judges no claim about GPUs.
"""

_RINGS = """
Written by `python -m benchmarks.ring_inference`. What is compared is a formula and a program on one
computer's processor and disk; it judges no claim about GPUs.
"""

_NCCL_READING = """
In-node all-to-alls that NVIDIA measured (aiconfigurator-core 0.12.0), 512 B to 512 MiB. For each system the link model
of two protocols is fitted to every other size and predicts those between.
"""

_WHY_ABOVE = """ There the measured times bend more often than a line for small messages and one for large ones can;
eight L40S, which have no NVLink, are also measured once a size: 512 KiB takes less than 256 KiB (504 and 522 us)."""

_READING = """
## What the model has, and what it lacks

- **Cores**: ranks that share cores take turns; each is slower by ranks over cores while all are busy. What they take
  from each other on the way to memory is measured, not modelled. Ranks that finish a phase early and begin to send
  while others still compute are not modelled: a collective starts when its last rank has arrived.
- **Messages**: each costs processor time and bytes on the wire (notices of readiness, acknowledgements), both counted.
- **gloo's network threads** at times poll in circles: a small exchange between two ranks takes anything from 0.1 to
  2 ms, nearly all of it processor time. The model charges the work alone, so steps of few milliseconds are its weakest,
  and those of two ranks that each have a NIC (2x1) come out too short by much the same time whatever the layer: there
  the call that starts an all-to-all took 1.3 to 1.9 ms before the wire was busy, which a bare exchange does not show.
- **Collectives of one group** go one after another in the model, as on NCCL; gloo carries several at a time, on one
  link. A step whose exchanges are launched behind sums of gradients waits less on gloo than the model says.
- **NICs**: shared by the ranks of a node. Unsynchronised senders leave holes on the wire; how many is measured for each
  cluster (`fabric.share`), not derived.
- **Switch buffers**: the cases here lose hardly a packet. Incast into a shallow buffer (many ranks, large messages)
  makes TCP wait for its retransmission timer; the model has no such wait and is too optimistic there. Metric
  `port_pressure` says where: above 1, a port can't hold the two segments that every sender keeps in flight.
- **CPU-bound cases** (cores busy for more than 60 % of the time and the wire for less than 80 %) say more about the
  scheduler of the operating system than about a network. They are listed, and judged by nobody.
"""


if __name__ == "__main__":
    print(write_page())
