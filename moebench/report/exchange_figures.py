"""The figures of exchanges: the map of who is faster where, times by payload, and what a network would have to be.

See figures.py for the rules. Each field has a sign and a number, so that no reader depends on its colour.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from moebench.report.figures import BACKED, NARROW, WIDE
from moebench.report.parts import number
from moebench.report.style import INK, MARKERS, MUTED, SERIES, figure_style, svg_of

FASTER, SLOWER, SAME = "▲", "▼", "="
SAME_WITHIN = 0.03
_SHADES = ((1 + SAME_WITHIN, 0.0), (1.5, 0.16), (3.0, 0.32), (np.inf, 0.5))  # up to this factor, this much colour


def sign_of(speedup: float) -> str:
    """Whether a speedup is above, below or about 1."""
    if abs(np.log(speedup)) <= np.log(1 + SAME_WITHIN):
        return SAME
    return FASTER if speedup > 1 else SLOWER


def condition_map(points: pd.DataFrame, baseline: str, narrow: bool = False) -> str:
    """A panel an exchange, a field a payload and topology size: its speedup over the baseline.

    Args:
        points: columns exchange, size, payload, value, note (why there is none), is_fastest (of all exchanges).
    """
    import matplotlib.pyplot as plt

    exchanges, sizes, payloads = (list(dict.fromkeys(points[name])) for name in ("exchange", "size", "payload"))
    rows, columns = (payloads, sizes) if narrow else (sizes, payloads)
    grid = (1, len(exchanges)) if narrow else (len(exchanges), 1)
    extent = (NARROW, 0.27 * len(rows) + 1.3) if narrow else (WIDE, (0.3 * len(rows) + 0.62) * len(exchanges) + 0.7)
    with figure_style():
        figure, axes = plt.subplots(*grid, figsize=extent, squeeze=False, layout="constrained")
        for axis, exchange in zip(axes.flat, exchanges):
            own = points[points["exchange"] == exchange]
            for _, p in own.iterrows():
                place = (sizes.index(p["size"]), payloads.index(p["payload"]))
                _field(axis, p, *(place if narrow else place[::-1]), narrow)
            axis.set_title(f"{exchange} against {baseline}")
            axis.set_xlim(-0.5, len(columns) - 0.5)
            axis.set_ylim(len(rows) - 0.5, -0.5)
            axis.set_xticks(range(len(columns)), [c.replace(" ", "\n") for c in columns], fontsize=7 if narrow else 8)
            axis.set_yticks(range(len(rows)), rows, fontsize=8)
            axis.grid(visible=False)
            axis.tick_params(length=0)
            for spine in axis.spines.values():
                spine.set_visible(False)
        if narrow:
            for axis in axes.flat[1:]:
                axis.set_yticks([])
        else:
            axes[-1, 0].set_xlabel("payload of a GPU")
        _map_legend(figure, plt, baseline, narrow)
        return svg_of(figure)


def _field(axis, point: pd.Series, x: int, y: int, narrow: bool) -> None:
    from matplotlib.patches import Rectangle

    size = 6.2 if narrow else 8
    if np.isnan(point["value"]):
        axis.text(x, y, "–", ha="center", va="center", fontsize=size, color=MUTED).set_in_layout(False)
        return
    value = float(point["value"])
    factor, sign = max(value, 1 / value), sign_of(value)
    shade = next(alpha for most, alpha in _SHADES if factor <= most)
    colour = SERIES[0] if value > 1 else SERIES[1]
    drawn = [axis.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=colour, alpha=shade, lw=0))]
    if point["is_fastest"]:
        drawn.append(axis.add_patch(Rectangle((x - 0.47, y - 0.44), 0.94, 0.88, fill=False, edgecolor=INK, lw=1.3)))
    drawn.append(axis.text(x, y, f"{sign}{_short(value)}", ha="center", va="center", fontsize=size))
    for artist in drawn:  # they lie inside the axes: measuring hundreds of them would take most of the time
        artist.set_in_layout(False)


def _short(value: float) -> str:
    """Two digits, and at most two behind the point: a field is narrow."""
    return number(value, 2) if value >= 0.1 else f"{value:.2f}"


def _map_legend(figure, plt, baseline: str, narrow: bool) -> None:
    marks = [
        (plt.Rectangle((0, 0), 1, 1, facecolor=SERIES[0], alpha=0.32), f"{FASTER} faster than {baseline}"),
        (plt.Rectangle((0, 0), 1, 1, facecolor=SERIES[1], alpha=0.32), f"{SLOWER} slower"),
        (plt.Rectangle((0, 0), 1, 1, fill=False, lw=0), f"{SAME} within {100 * SAME_WITHIN:.0f} %"),
        (plt.Rectangle((0, 0), 1, 1, facecolor="none", edgecolor=INK, lw=1.3), "the fastest of all"),
    ]
    handles, labels = zip(*marks)
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if narrow else 4, fontsize=8)


def times_figure(points: pd.DataFrame, names: Sequence[str], narrow: bool = False) -> str:
    """Time of one exchange against the payload, a panel a topology size, a line an exchange with its interval.

    Args:
        points: columns size, exchange, payload_bytes, payload, time_us, low_us, high_us.
        names: exchanges; one's place decides its colour and mark.
    """
    import matplotlib.pyplot as plt

    sizes = list(dict.fromkeys(points["size"]))
    shape, extent = ((len(sizes), 1), (NARROW, 2.4 * len(sizes) + 0.5)) if narrow else (
        (1, len(sizes)), (min(3.3 * len(sizes) + 0.5, 1.15 * WIDE), 3.2)
    )  # fmt: skip
    with figure_style():
        figure, axes = plt.subplots(
            *shape, figsize=extent, sharex=True, sharey=True, squeeze=False, layout="constrained"
        )
        for axis, size in zip(axes.flat, sizes):
            for place, name in enumerate(names):
                own = points[(points["size"] == size) & (points["exchange"] == name)].dropna(subset="time_us")
                colour, mark = SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]
                axis.fill_between(own["payload_bytes"], own["low_us"], own["high_us"], color=colour, alpha=0.16, lw=0)
                axis.plot(own["payload_bytes"], own["time_us"], marker=mark, color=colour, ms=4, lw=1.2, label=name)
            axis.set_title(size)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
        _byte_ticks(axes, points)
        _plain_times(axes)
        for axis in axes[-1]:
            axis.set_xlabel("payload of a GPU")
        for axis in axes[:, 0]:
            axis.set_ylabel("time of one exchange")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8.5)
        return svg_of(figure)


def _byte_ticks(axes, points: pd.DataFrame) -> None:
    """Every second payload by its name."""
    names = points.drop_duplicates("payload_bytes").sort_values("payload_bytes")[["payload_bytes", "payload"]]
    kept = names.iloc[::2]
    for axis in axes.flat:
        axis.set_xticks(list(kept["payload_bytes"]), [p.replace(" ", "\n") for p in kept["payload"]], fontsize=8)
        axis.set_xticks([], minor=True)


def _plain_times(axes) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    def text(value: float, _: int) -> str:
        scale, unit = next(((s, u) for s, u in ((1e6, "s"), (1e3, "ms")) if value >= s), (1.0, "us"))
        return f"{value / scale:g} {unit}"

    for axis in axes.flat:
        axis.yaxis.set_major_formatter(FuncFormatter(text))
        axis.yaxis.set_minor_locator(NullLocator())


def needs_figure(
    bars: pd.DataFrame, known: pd.DataFrame, claims: Sequence[str], label: str, narrow: bool = False
) -> str:
    """At what values of a parameter each claim holds, a row a payload; a panel a kind of machine.

    Args:
        bars: columns machine, payload, claim, low, high (of the parameter; equal where it is one value).
        known: columns machine, own, low, high: the parameter as the machine's file has it, and its range.
        claims: one's place decides its colour and mark.
        label: of the axis.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    machines = list(dict.fromkeys(bars["machine"]))
    rows = {m: list(dict.fromkeys(bars.loc[bars["machine"] == m, "payload"])) for m in machines}
    heights = [len(rows[m]) for m in machines]
    with figure_style():
        figure, axes = plt.subplots(
            len(machines), 1, squeeze=False, sharex=True, layout="constrained", height_ratios=[h + 1 for h in heights],
            figsize=(NARROW if narrow else WIDE, 0.25 * sum(heights) + 0.55 * len(machines) + 0.9),
        )  # fmt: skip
        for axis, machine in zip(axes[:, 0], machines):
            _needs_panel(axis, bars[bars["machine"] == machine], rows[machine], claims)
            row = known[known["machine"] == machine].iloc[0]
            axis.axvspan(row["low"], row["high"], color=MUTED, alpha=0.16, lw=0)
            axis.axvline(row["own"], color=INK, lw=1, ls=":")
            axis.annotate(
                f"as described: {number(row['own'])}", (row["own"], 1), xycoords=("data", "axes fraction"),
                xytext=(3, 2), textcoords="offset points", fontsize=7.5, bbox=BACKED,
            )  # fmt: skip
            axis.set_title(machine, fontsize=9, pad=14)
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(numticks=5 if narrow else 9))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes[-1, 0].set_xlabel(label)
        handles = [
            plt.Line2D([], [], color=SERIES[i % len(SERIES)], marker=MARKERS[i % len(MARKERS)], lw=3, ms=6)
            for i in range(len(claims))
        ]
        figure.legend(handles, claims, loc="outside lower center", ncols=1 if narrow else 2, fontsize=8)
        return svg_of(figure)


def plane_figure(bands: pd.DataFrame, machines: pd.DataFrame, known: tuple[float, float], narrow: bool = False) -> str:
    """Where claims hold by the speed inside a node and the cost of a message between nodes.

    Args:
        bands: columns claim, link (GB/s), low, high (us, between which it holds), even (us, where the exchange is as
            fast as its baseline).
        machines: columns name, link, message: machines as they are described.
        known: the range of the message's cost that the default machine's file states, us.
    """
    import matplotlib.pyplot as plt

    with figure_style():
        figure, axis = plt.subplots(figsize=(NARROW if narrow else WIDE, 3.6), layout="constrained")
        axis.axhspan(*known, color=MUTED, alpha=0.16, lw=0)
        for place, (claim, own) in enumerate(bands.groupby("claim", sort=False)):
            colour = SERIES[place % len(SERIES)]
            axis.fill_between(own["link"], own["low"], own["high"], color=colour, alpha=0.55, lw=0, label=claim)
            axis.plot(own["link"], own["even"], color=colour, lw=1.2, ls="--")
        axis.plot(machines["link"], machines["message"], ls="", marker="o", ms=4, color=INK)
        for place, machine in enumerate(machines.itertuples()):
            axis.annotate(
                machine.name, (machine.link, machine.message), xytext=(2, (-12, 5, -23)[place % 3]),
                textcoords="offset points", fontsize=7.5, bbox=BACKED,
            )  # fmt: skip
        axis.set_xscale("log")
        axis.set_yscale("log")
        _plain_numbers(axis.xaxis)
        _plain_numbers(axis.yaxis)
        axis.set_xlabel("inside a node, GB/s a GPU")
        axis.set_ylabel("a message between nodes, us")
        columns = 1 if narrow else 2
        figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=columns, fontsize=8)
        return svg_of(figure)


def _plain_numbers(axis) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(numticks=6))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _needs_panel(axis, bars: pd.DataFrame, rows: Sequence[str], claims: Sequence[str]) -> None:
    present = [claim for claim in claims if claim in set(bars["claim"])]
    spread = dict(zip(present, np.linspace(-0.2, 0.2, len(present)) if len(present) > 1 else [0.0]))
    for _, bar in bars.dropna(subset="low").iterrows():
        place = claims.index(bar["claim"])
        colour, mark = SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]
        y = rows.index(bar["payload"]) + spread[bar["claim"]]
        axis.plot([bar["low"], bar["high"]], [y, y], color=colour, lw=3, solid_capstyle="butt", alpha=0.75)
        axis.plot([bar["high"]], [y], marker=mark, color=colour, ms=5)
    axis.set_yticks(range(len(rows)), rows, fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
