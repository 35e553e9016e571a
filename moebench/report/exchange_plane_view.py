"""What claims about exchanges would need of two things at once: the speed inside a node and the cost of a message.

Below it what they would need of a third, congestion that the model does not price.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd

from moebench.claims.congestion import Congestion, congestion
from moebench.claims.evidence import Evidence
from moebench.claims.needs import amount_words
from moebench.claims.plane import Plane, break_even, costs, planes, together
from moebench.claims.reported import Claim
from moebench.claims.scoreboard import Score
from moebench.claims.why import reported
from moebench.claims.words import listed
from moebench.report.exchange_figures import plane_figure
from moebench.report.exchange_needs_view import range_words, span_words
from moebench.report.parts import Figure, Table, figure, number
from moebench.results.store import RunFolder
from moebench.workloads.machine import Topology
from moebench.workloads.suite import ExchangeExperiment
from moebench.workloads.units import BYTES, parse_quantity

MICRO, GIGA = 1e6, 1e9
TOLD = (1, 4, 16, 64, 1024)  # times as fast, in the table


def plane_figures(folder: RunFolder, experiment: ExchangeExperiment, scores: Sequence[Score]) -> list[Figure]:
    """The plane of the claims that have a number; none without rows."""
    evidence = Evidence.of(folder)
    found = planes([score.claim for score in scores], folder.suite, evidence, folder.topologies)
    if not found:
        return []
    first = found[0]
    bands, machines = pd.concat([_band(plane) for plane in found]), _machines(folder.topologies, first.nics)
    known = first.message.low * MICRO, first.message.high * MICRO
    caption = (
        "Filled: where a claim holds (within 15 %), everything else as described. Dashed: where the exchange is as "
        "fast as its baseline; above it is faster. Everything inside a node is faster by the same factor, up to "
        f"{number(first.faster[-1])} times. Shaded: the range that the default machine's file states for a message. "
        "Dots: kinds of node as described, with as many NICs."
    )
    title = "What the claims would need: the nodes and the messages"
    draw = partial(plane_figure, bands, machines, known)
    claims = [plane.claim for plane in found]
    loss = congestion(claims, folder.suite, evidence, folder.topologies)
    finding = f"{_finding(found)} {_loss_finding(loss, first)}".strip()
    below = _loss_table(loss, claims, first.choice.payload) if loss else None
    return [figure(f"plane-{experiment.name}", title, finding, caption, draw, _table(found), below)]


def _label(plane: Plane) -> str:
    return f"{plane.claim.id}: {reported(plane.claim)} on {plane.point.topology}"


def _band(plane: Plane) -> pd.DataFrame:
    low, high = costs(plane)
    frame = pd.DataFrame({"link": plane.faster * plane.link.value / GIGA, "low": low, "high": high})
    frame["even"] = break_even(plane)
    frame[["low", "high", "even"]] *= MICRO
    return frame.assign(claim=_label(plane))


def _machines(topologies: Mapping[str, Topology], nics: int) -> pd.DataFrame:
    """Kinds of node with that many NICs whose messages and links have a rate, those of the same numbers together."""
    found: dict[tuple[float, float], dict[str, None]] = {}
    for name, topology in topologies.items():
        link, message = (topology.link_parameters.get(key) for key in ("link.bandwidth", "nic.message"))
        if link is not None and message is not None and topology.nics_per_node == nics:
            found.setdefault((link.value / GIGA, message.value * MICRO), {})[name.partition("-")[2]] = None
    rows = [{"name": ", ".join(names), "link": link, "message": us} for (link, us), names in found.items()]
    return pd.DataFrame(rows, columns=["name", "link", "message"]).sort_values("link")


def _finding(found: Sequence[Plane]) -> str:
    """What each claim needs with nodes as described and with the fastest ones, and whether all can hold at once."""
    told = []
    for plane in found:
        (low, high), claim = costs(plane), plane.claim
        told.append(
            f"{claim.id} ({reported(claim)} on {plane.point.topology}) holds with {_span(low[0], high[0])} a message "
            f"in nodes as described, and with {_span(low[-1], high[-1])} in nodes {number(plane.faster[-1])} times as "
            "fast."
        )
    if len(found) > 1:
        names, at = listed([plane.claim.id for plane in found]), together(found)
        if at is None:
            told.append(f"No speed of the nodes and no cost of a message gives {names} at once.")
        else:
            told.append(f"{names} hold at once in nodes {number(at[0])} times as fast with {_span(*at[1:])} a message.")
    payload = found[0].choice.payload
    return f"{f'At {payload} a GPU: ' if payload else ''}{' '.join(told)}"


def _loss_finding(loss: Sequence[Congestion], first: Plane) -> str:
    """On which kinds of node congestion of the baseline alone would make all claims hold."""
    own = [part for part in loss if part.choice.payload == first.choice.payload]
    some = [part for part in own if part.at_once is not None]
    if len(next((part.by_claim for part in own), ())) < 2:
        return ""
    baseline, names = first.claim.baseline, listed(list(own[0].by_claim))
    if not some:
        return f"Congestion that takes rate from {baseline} alone does not give {names} at once either."
    told = listed([f"{span_words(part.at_once)} on {part.choice.gpu}" for part in some if part.at_once])
    any_need = next(iter(own[0].by_claim.values()))
    known = f"{amount_words(any_need, any_need.own)}, {range_words(any_need)}"
    return (
        f"Congestion that takes rate from {baseline} alone would give {names} at once: with a fabric.share for "
        f"{baseline} of {told}, and as described for the other ({known}). The model prices both alike."
    )


def _loss_table(loss: Sequence[Congestion], claims: Sequence[Claim], payload: str) -> Table:
    """A row a kind of node at the default payload, and at which other payloads some share gives all."""
    rows = []
    for part in (part for part in loss if part.choice.payload == payload):
        first = next(iter(part.by_claim.values()))
        rows.append([
            part.choice.gpu, f"{amount_words(first, first.own)} ({range_words(first)})",
            *[span_words(part.by_claim[claim.id]) for claim in claims if claim.id in part.by_claim],
            "none" if part.at_once is None else span_words(part.at_once), _alike(loss, part.choice.gpu),
        ])  # fmt: skip
    names = [claim.id for claim in claims if claim.id in loss[0].by_claim]
    columns = ["kind of node", "as described", *names, "all at once", "all at once with"]
    where = f" at {payload} a GPU" if payload else ""
    caption = f"If congestion took rate from {claims[0].baseline} alone: its fabric.share{where}"
    return Table(columns, rows, caption)


def _alike(loss: Sequence[Congestion], gpu: str) -> str:
    """The payloads at which some share gives all on a kind of node: `1 MiB to 1 GiB` where none between is left out."""
    own = [part for part in loss if part.choice.gpu == gpu]
    if not own[0].choice.payload:
        return "the only payload"
    own.sort(key=lambda part: float(parse_quantity(part.choice.payload, BYTES, "payload")))
    at = [place for place, part in enumerate(own) if part.at_once is not None]
    names = [own[place].choice.payload for place in at]
    if len(at) > 2 and at[-1] - at[0] == len(at) - 1:
        return f"{names[0]} to {names[-1]}"
    return listed(names) if names else "none"


def _span(low_s: float, high_s: float) -> str:
    return "no cost" if np.isnan(low_s) else f"{number(low_s * MICRO)} to {number(high_s * MICRO)} us"


def _table(found: Sequence[Plane]) -> Table:
    rows = []
    for plane in found:
        (low, high), even = costs(plane), break_even(plane)
        for times in TOLD:
            at = int(np.abs(np.log(plane.faster / times)).argmin())
            rows.append(
                [plane.claim.id, f"{times:,}", number(plane.faster[at] * plane.link.value / GIGA),
                 "never" if np.isnan(even[at]) else f"{number(even[at] * MICRO)} us", _span(low[at], high[at])]
            )  # fmt: skip
    columns = ["claim", "times as fast inside", "GB/s a GPU", "as fast as its baseline from", "holds with, a message"]
    return Table(columns, rows, "What a message between nodes would have to cost", frozenset(columns[1:3]))
