"""The figures of a report, each a pure function from a frame to SVG with sentinel colours (see style.py).

Reported values are hollow, obtained ones solid with their interval; what could not run is written where its point would
be. Nothing is drawn that is not in the frame. Each is drawn twice: as wide as a desk's page, and `narrow` for a phone,
where panels stand below each other and labels above what they name.
"""

from collections.abc import Sequence
from textwrap import wrap

import numpy as np
import pandas as pd

from moebench.report.parts import number
from moebench.report.style import HATCHES, INK, MARKERS, MUTED, PAPER, SERIES, figure_style, svg_of

WIDE, NARROW = 6.8, 3.9  # inches
BACKED = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8}  # text that lies on lines

REGION_COLOURS = {
    "gate": SERIES[3],
    "dispatch": SERIES[1],
    "exchange": SERIES[0],
    "experts": SERIES[2],
    "combine": SERIES[4],
    "attention": SERIES[6],
    "dense": SERIES[5],
    "loss": SERIES[7],
    "grad-sync": SERIES[5],
    "optimizer": SERIES[8],
    "host": MUTED,
}


MOST_COLUMNS = 4  # panels side by side
LABEL_CHARACTERS = 19  # of an upright label: what stands beside it in the lowest panel


def speedup_figure(
    points: pd.DataFrame, reported: pd.DataFrame, y_label: str, narrow: bool = False, bound: float | None = None
) -> str:
    """Speedup against batch size, one panel a gate, one line a topology size.

    Args:
        points: columns gate, batch_size, size, value, low, high, note (why there is no value).
        reported: columns gate, batch_size, value, label.
        bound: reported for all points: a line in every panel. The axis then shows where the points are, not zero.
    """
    import matplotlib.pyplot as plt

    gates = list(dict.fromkeys(points["gate"]))
    sizes = sorted(set(points["size"]), key=_nodes_and_ranks)
    batches = sorted(points["batch_size"].unique())
    columns = 1 if narrow else min(len(gates), MOST_COLUMNS)
    lines = -(-len(gates) // columns)
    extent = (NARROW, 2.3 * lines + 0.6) if narrow else (2.9 * columns + 0.8, 3.0 * lines + 0.6)
    with figure_style():
        figure, axes = plt.subplots(lines, columns, figsize=extent, sharey=True, squeeze=False, layout="constrained")
        for axis, gate in zip(axes.flat, gates):
            _speedup_panel(axis, points[points["gate"] == gate], sizes, batches)
            for _, row in reported[reported["gate"] == gate].iterrows():
                x = batches.index(row["batch_size"]) if row["batch_size"] in batches else np.nan
                axis.plot(x, row["value"], "D", ms=9, mfc="none", mec=INK, mew=1.6, zorder=5)
                axis.annotate(
                    row["label"], (x, row["value"]), xytext=(0, 9), textcoords="offset points", ha="center", fontsize=8
                )
            axis.axhline(1, color=MUTED, lw=1, ls=":")
            axis.set_title(gate)
            axis.set_xlabel("sequences a GPU")
            axis.margins(y=0.18)
            if bound is None:
                axis.set_ylim(bottom=0)
            else:
                axis.axhline(bound, color=INK, lw=1.2, ls="--")
                axis.annotate(f"reported {bound:g}x", (0, bound), xycoords=("axes fraction", "data"), xytext=(3, 3),
                              textcoords="offset points", fontsize=8)  # fmt: skip
        for axis in axes.flat[len(gates) :]:
            axis.set_visible(False)
        for axis in axes[:, 0]:
            axis.set_ylabel(y_label)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(sizes), title=None)
        return svg_of(figure)


def _speedup_panel(axis, points: pd.DataFrame, sizes: Sequence[str], batches: Sequence[int]) -> None:
    offsets = np.linspace(-0.18, 0.18, max(len(sizes), 2))
    missing: dict[int, dict[str, list[str]]] = {}  # place -> why there is no value -> on which sizes
    known = np.zeros(len(batches), dtype=bool)
    for i, size in enumerate(sizes):
        line = points[points["size"] == size].set_index("batch_size").reindex(batches)
        x = np.arange(len(batches)) + offsets[i]
        value = line["value"].to_numpy(dtype=float)
        error = np.vstack([value - line["low"].to_numpy(dtype=float), line["high"].to_numpy(dtype=float) - value])
        axis.errorbar(
            x, value, yerr=np.clip(error, 0, None), color=SERIES[i], marker=MARKERS[i], ms=5, lw=1.3, elinewidth=1,
            capsize=2, label=size,
        )  # fmt: skip
        known |= ~np.isnan(value)
        for j, note in enumerate(line["note"]):
            if isinstance(note, str) and note:
                missing.setdefault(j, {}).setdefault(note, []).append(size)
    for j, notes in missing.items():
        told = [note if len(on) == len(sizes) else f"{note} on {', '.join(on)}" for note, on in notes.items()]
        text = "\n".join(line for one in told for line in wrap(one, LABEL_CHARACTERS))
        x, side = (j + 0.3, "left") if known[j] else (j, "center")  # beside the points of other sizes
        axis.annotate(text, (x, 0), xycoords=("data", "axes fraction"), xytext=(0, 6), textcoords="offset points",
                      ha=side, va="bottom", rotation=90, fontsize=7.5, color=MUTED, linespacing=1.0)  # fmt: skip
    axis.set_xticks(range(len(batches)), [str(b) for b in batches])
    axis.set_xlim(-0.5, len(batches) - 0.5)
    axis.grid(axis="x", visible=False)


def _nodes_and_ranks(size: str) -> tuple[int, ...]:
    """`4x8` in the order of numbers."""
    return tuple(int(part) for part in size.split("x"))


def map_figure(
    conditions: pd.DataFrame, reported: float, tolerance: float, x_label: str, narrow: bool = False
) -> str:
    """One row an assumption: median and 5-95 % interval of what we obtain, beside the reported value.

    Args:
        conditions: columns label, group, median, low, high, note; `note` stands where nothing can be obtained.
        tolerance: half-width of the band that counts as reproduced, in the units of the axis.
    """
    import matplotlib.pyplot as plt

    groups = list(dict.fromkeys(conditions["group"]))
    with figure_style():
        height = (0.38 if narrow else 0.2) * (len(conditions) + 1.5 * len(groups)) + 0.9
        figure, axis = plt.subplots(figsize=(NARROW if narrow else WIDE, height), layout="constrained")
        y, labels = 0.0, []
        for i, group in enumerate(groups):
            labels.append((y, group, True))
            y -= 1.0
            for _, row in conditions[conditions["group"] == group].iterrows():
                _map_row(axis, row, y, SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)], -4 if narrow else 0)
                labels.append((y, row["label"], False))
                y -= 1.0
            y -= 0.5
        axis.axvspan(reported - tolerance, reported + tolerance, color=MUTED, alpha=0.18, lw=0)
        axis.axvline(reported, color=INK, lw=1.2, ls="--")
        axis.axvline(1, color=MUTED, lw=1, ls=":")
        axis.annotate(
            f"reported {reported:g}", (reported, 1), xycoords=("data", "axes fraction"), xytext=(0, 3),
            textcoords="offset points", ha="center", va="bottom", fontsize=8.5,
        )  # fmt: skip
        _label_rows(axis, labels, narrow)
        axis.set_ylim(y + 0.5, 1.0)
        axis.set_xlim(left=0)
        axis.set_xlabel(x_label)
        axis.grid(axis="y", visible=False)
        return svg_of(figure)


def _label_rows(axis, labels: Sequence[tuple[float, str, bool]], narrow: bool) -> None:
    """Names of rows (y, text, whether it heads a group): on the axis, or inside it above each row."""
    if not narrow:
        axis.set_yticks([y for y, _, _ in labels], [text for _, text, _ in labels], fontsize=8.5)
        for tick, (_, _, is_head) in zip(axis.get_yticklabels(), labels):
            tick.set_fontweight("bold" if is_head else "normal")
        return
    axis.set_yticks([])
    for y, text, is_head in labels:
        axis.annotate(
            text, (0, y), xycoords=("axes fraction", "data"), xytext=(2, 0 if is_head else 4), fontsize=8,
            textcoords="offset points", va="bottom", fontweight="bold" if is_head else "normal", bbox=BACKED,
        )  # fmt: skip


def _map_row(axis, row: pd.Series, y: float, colour: str, marker: str, note_shift_pt: float) -> None:
    if pd.notna(row["median"]):
        axis.plot([row["low"], row["high"]], [y, y], color=colour, lw=2.4, solid_capstyle="round", alpha=0.55)
        axis.plot(row["median"], y, marker, color=colour, ms=5.5)
    if row["note"]:
        x = row["high"] if pd.notna(row["median"]) else 0
        axis.annotate(
            row["note"], (x, y), xytext=(6, note_shift_pt), textcoords="offset points", va="center", fontsize=8,
            color=MUTED, bbox=BACKED,
        )  # fmt: skip


def deciding_figure(
    draws: pd.DataFrame, x_label: str, y_label: str, reported: float, tolerance: float, narrow: bool = False
) -> str:
    """Every draw of the default assumption: what is obtained against the parameter that decides.

    Args:
        draws: columns x, y.
    """
    import matplotlib.pyplot as plt

    with figure_style():
        figure, axis = plt.subplots(figsize=(NARROW if narrow else 5.6, 3.2), layout="constrained")
        axis.plot(draws["x"], draws["y"], "o", color=SERIES[0], ms=3.2, alpha=0.55, mew=0)
        axis.axhspan(reported - tolerance, reported + tolerance, color=MUTED, alpha=0.18, lw=0)
        axis.axhline(reported, color=INK, lw=1.2, ls="--")
        axis.annotate(f"reported {reported:g}", (1, reported), xycoords=("axes fraction", "data"), xytext=(-2, 3),
                      textcoords="offset points", ha="right", fontsize=8.5, bbox=BACKED)  # fmt: skip
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.set_ylim(bottom=0)
        return svg_of(figure)


def breakdown_figure(parts: pd.DataFrame, narrow: bool = False) -> str:
    """Where the step time goes: one stacked bar a system.

    Args:
        parts: columns system, region, time_ms; the rows of a system add up to its step time.
    """
    import matplotlib.pyplot as plt

    systems = list(dict.fromkeys(parts["system"]))
    regions = [r for r in REGION_COLOURS if r in set(parts["region"])]
    with figure_style():
        extent = (NARROW, 0.62 * len(systems) + 1.7) if narrow else (WIDE, 0.42 * len(systems) + 1.3)
        height = 0.45 if narrow else 0.62
        figure, axis = plt.subplots(figsize=extent, layout="constrained")
        for i, system in enumerate(systems):
            left = 0.0
            for region in regions:
                time_ms = parts.loc[(parts["system"] == system) & (parts["region"] == region), "time_ms"].sum()
                axis.barh(
                    -i, time_ms, left=left, height=height, color=REGION_COLOURS[region], edgecolor=PAPER, lw=0.6,
                    hatch=HATCHES[regions.index(region) % len(HATCHES)], label=region if i == 0 else None,
                )  # fmt: skip
                left += time_ms
            axis.annotate(f"{number(left)} ms", (left, -i), xytext=(5, 0), textcoords="offset points", va="center")
        if narrow:
            axis.set_yticks([])
            for i, system in enumerate(systems):
                axis.annotate(
                    system, (0, -i + 0.26), xytext=(0, 1), textcoords="offset points", va="bottom", fontsize=9
                )
        else:
            axis.set_yticks([-i for i in range(len(systems))], systems)
        axis.set_xlabel("step time, ms")
        axis.margins(x=0.25 if narrow else 0.12)
        axis.grid(axis="y", visible=False)
        figure.legend(loc="outside lower center", ncols=min(len(regions), 3 if narrow else 5), fontsize=8.5)
        return svg_of(figure)


def timeline_figure(cases: Sequence[tuple[str, pd.DataFrame]], narrow: bool = False) -> str:
    """Operators over time on the host, compute and communication tracks of each case, one shared time axis.

    Args:
        cases: (system, frame with columns track, start_ms, end_ms, region).
    """
    import matplotlib.pyplot as plt

    tracks = ("host", "compute", "communication")
    present = {region for _, frame in cases for region in frame["region"]}
    with figure_style():
        figure, axes = plt.subplots(
            len(cases), 1, figsize=(NARROW if narrow else WIDE, 1.25 * len(cases) + 0.9), sharex=True, squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for axis, (system, frame) in zip(axes[:, 0], cases):
            for (track, region), part in frame.groupby(["track", "region"], sort=False):
                spans = [(a, max(b - a, 0.0)) for a, b in zip(part["start_ms"], part["end_ms"])]
                # The edge keeps operators visible that are narrower than a line.
                axis.broken_barh(spans, (-tracks.index(track) - 0.4, 0.8), color=REGION_COLOURS[region], lw=0.4)
            axis.set_yticks([0, -1, -2], tracks, fontsize=8.5)
            axis.set_ylim(-2.5, 0.5)
            axis.set_title(system)
            axis.grid(axis="y", visible=False)
        axes[-1, 0].set_xlabel("time, ms")
        axes[-1, 0].set_xlim(left=0)
        handles = [plt.Rectangle((0, 0), 1, 1, color=REGION_COLOURS[r]) for r in REGION_COLOURS if r in present]
        labels = [r for r in REGION_COLOURS if r in present]
        columns = min(len(labels), 3 if narrow else 5)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8.5)
        return svg_of(figure)
