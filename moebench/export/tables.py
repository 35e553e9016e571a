"""Rows of a run as a wide table: a line a case, a column a metric with its unit in the header. CSV or Markdown.

CSV has everything in SI units. Markdown is for readers: columns that are the same in every line stand above the table,
units fit the numbers, and only some metrics are shown.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from moebench.compare.escape import markdown, plain, prose
from moebench.export.order import natural
from moebench.results.rows import KIND_COLUMNS, SUBJECTS, Row
from moebench.results.store import RunFolder
from moebench.workloads.errors import InputError, one_of

KEYS = (
    "case", "experiment", "system", "topology", "hardware", "engine", "regime", "conventions", "is_default", "dtype",
    *dict.fromkeys(name for columns in KIND_COLUMNS for name in columns), "d_model", "d_ffn", "variant",
)  # fmt: skip
_UNITS_OF_KEYS = {"payload_bytes": "B"}
INTERVALS = "Intervals: 5 to 95 % of the draws where simulated, bootstrap 95 % where measured."
READ = (*SUBJECTS, "peak_memory", "flops", "launches")  # metrics that Markdown shows where none are asked for
_SCALES: Mapping[str, tuple[tuple[float, str], ...]] = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "B": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
    "FLOP": ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP")),
    "B/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1.0, "B/s")),
    "FLOP/s": ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1.0, "FLOP/s")),
}


@dataclass
class Line:
    """A case in one regime: its keys, what became of it, and its metrics with their intervals."""

    keys: dict[str, str]
    status: str = "passed"
    reason: str = ""
    values: dict[str, tuple[float | None, float | None, float | None]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the case, and the regime."""
        return f"{self.keys['case']} {self.keys['regime']}"


@dataclass(frozen=True)
class Wide:
    """The lines of a run, and the units of the metrics that they have, in order."""

    lines: Sequence[Line]
    units: Mapping[str, str]

    def keys(self) -> list[str]:
        """Keys that some line has."""
        return [name for name in KEYS if any(line.keys.get(name) for line in self.lines)]

    def has_interval(self, metric: str) -> bool:
        """Whether some line has one."""
        return any(value[1] is not None for line in self.lines if (value := line.values.get(metric)) is not None)


def wide(folder: RunFolder, experiments: Sequence[str] = (), metrics: Sequence[str] = ()) -> Wide:
    """The summaries of a run's cases; rows of a region, a tier, a sample and the like are left out.

    Args:
        experiments, metrics: only these.

    Raises:
        InputError: the run has no such metric, or no rows.
    """
    found: dict[tuple[str, str], Line] = {}
    units: dict[str, str] = {}
    for row in folder.rows():
        if is_whole(row) and (not experiments or row.experiment in experiments):
            _add(found, units, row)
    if not found:
        raise InputError(f"{folder.path}: no rows" + (f" of {', '.join(experiments)}" if experiments else ""))
    for name in metrics:
        if name not in units:
            raise one_of("metric", name, list(units), str(folder.path))
    places = {experiment.name: place for place, experiment in enumerate(folder.suite.experiments)}
    lines = sorted(_whole_lines(found), key=lambda line: (places.get(line.keys["experiment"], 0), natural(line.name)))
    return Wide(lines, {name: unit for name, unit in units.items() if not metrics or name in metrics})


def is_whole(row: Row) -> bool:
    """Whether a row is about a whole case: not about a sample or a part of it, which its detail would name."""
    return row.sample is None and (row.metric in SUBJECTS or set(row.detail) <= {"regime"})


def _add(found: dict[tuple[str, str], Line], units: dict[str, str], row: Row) -> None:
    regime = str(row.detail.get("regime", ""))
    line = found.get((row.case, regime))
    if line is None:
        keys = {name: _text(getattr(row, name, None)) for name in KEYS} | {"regime": regime}
        line = found[row.case, regime] = Line(keys)
    if row.metric in SUBJECTS:
        line.status, line.reason = row.status, row.reason
    line.values.setdefault(row.metric, (row.value, row.low, row.high))
    units.setdefault(row.metric, row.unit)


def _whole_lines(found: Mapping[tuple[str, str], Line]) -> Iterator[Line]:
    """A line a case and regime; what belongs to no regime stands in the lines of all that a case has."""
    divided = {case for case, regime in found if regime}
    for (case, regime), line in found.items():
        if regime:
            common = found.get((case, ""))
            yield replace(line, values={**common.values, **line.values}) if common else line
        elif case not in divided:
            yield line


def _text(value: object) -> str:
    return "" if value is None else str(value)


def csv_text(table: Wide) -> str:
    """Everything, in SI units, numbers as they stand in the rows."""
    keys = table.keys()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = [_with_unit(name, _UNITS_OF_KEYS.get(name, "1")) for name in keys]
    parts = {name: ("", " low", " high") if table.has_interval(name) else ("",) for name in table.units}
    names = [_with_unit(f"{name}{part}", unit) for name, unit in table.units.items() for part in parts[name]]
    writer.writerow([*header, "status", "reason", *names])
    for line in table.lines:
        numbers = [
            "" if (value := line.values.get(name, (None,) * 3)[i]) is None else repr(value).removesuffix(".0")
            for name in table.units
            for i in range(len(parts[name]))
        ]
        writer.writerow([*(line.keys[name] for name in keys), line.status, line.reason, *numbers])
    return text.getvalue()


def _with_unit(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit not in ("", "1") else name


def markdown_text(table: Wide, metrics: Sequence[str] = ()) -> str:
    """A table for readers.

    Args:
        metrics: those to show; by default `READ`, as far as the run has them.
    """
    shown = [name for name in table.units if name in (metrics or READ)]
    keys = table.keys()
    same = {name for name in keys if name != "case" and len({line.keys[name] for line in table.lines}) == 1}
    kept = [name for name in keys if name not in same and name not in _IN_THE_NAME]
    scales = {name: _scale(table.units[name], [line.values.get(name) for line in table.lines]) for name in shown}
    titles = [*kept, *(t for name in shown for t in _titles(name, scales[name][1], table.has_interval(name))), "note"]
    everywhere = [f"{name} {_code(table.lines[0].keys[name])}" for name in keys if name in same & set(_SAID)]
    out = [f"In every row: {', '.join(everywhere)}.", ""] if everywhere else []
    out += [_row(titles), _row([*["---"] * len(kept), *["---:"] * (len(titles) - len(kept) - 1), "---"])]
    for line in table.lines:
        cells = [_code(line.keys[name]) for name in kept]
        for name in shown:
            cells += _cells(line.values.get(name), scales[name][0], table.has_interval(name))
        note = _note(line)
        out.append(_row([*cells, note if _PLAIN.fullmatch(note) else prose(note)]))
    if any(table.has_interval(name) for name in shown):
        out += ["", INTERVALS]
    return "\n".join(out) + "\n"


# Parts of a case's name, which stands in every line; and what is said above the table where it is the same in all.
_IN_THE_NAME = ("experiment", "system", "topology", "gate", "batch_size", "experts", "shape", "op", "payload_bytes",
                "tokens", "top_k", "direction", "conventions", "hardware", "d_model", "d_ffn")  # fmt: skip
_SAID = ("hardware", "engine", "regime", "conventions", "dtype", "input_gradient")
_SAFE = re.compile(r"[\w./+=,: -]+", re.ASCII)  # inside backticks
_PLAIN = re.compile(r"[A-Za-z0-9 ./+=,:;()%'-]*")  # means nothing to Markdown inside a cell


def _code(text: str) -> str:
    """As code: between backticks where nothing in it could end or bend them."""
    return f"`{text}`" if _SAFE.fullmatch(text) else markdown(text)


def _note(line: Line) -> str:
    if line.status == "passed":
        return plain(line.reason)
    return plain(f"{line.status}: {line.reason}" if line.reason else line.status)


def _scale(unit: str, values: Iterable[tuple[float | None, ...] | None]) -> tuple[float, str]:
    """The unit that fits the largest value."""
    largest = max((abs(value[0]) for value in values if value is not None and value[0] is not None), default=0.0)
    scales = _SCALES.get(unit, ((1.0, "" if unit == "1" else unit),))
    return next((scale for scale in scales if largest >= scale[0]), scales[-1])


def _titles(name: str, unit: str, has_interval: bool) -> list[str]:
    title = f"{name.replace('_', ' ')}" + (f", {unit}" if unit else "")
    return [title, f"interval, {unit}" if unit else "interval"] if has_interval else [title]


def _cells(value: tuple[float | None, ...] | None, scale: float, has_interval: bool) -> list[str]:
    middle, low, high = value or (None, None, None)
    cells = ["" if middle is None else _digits(middle / scale)]
    if has_interval:
        cells.append("" if low is None or high is None else f"{_digits(low / scale)} to {_digits(high / scale)}")
    return cells


def _digits(value: float) -> str:
    """Four digits; whole numbers in full."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
