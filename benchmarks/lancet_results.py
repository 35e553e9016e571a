"""What `benchmarks.lancet_measured` found: the gain, where the time of both systems goes, what was expected of them.

Arithmetic and text only: docs/accuracy.md can be written again from the files without measuring.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows_csv import read_rows, write_rows

RAF, LANCET, ALONE = "raf", "lancet", " alone"
SHARE_AIM = (0.30, 0.50)  # of RAF's step that communication takes
SHARED = 0.9  # of the time one after another; below it collectives share the link
SEED, DRAWS, INTERVAL = 0, 2000, (2.5, 97.5)
# Parts of a step that add up to it: field, and what it is.
PARTS = (
    ("same_s", "calls that both make"),
    ("own_s", "calls that only one makes: the forward, whole or in parts"),
    ("launch_s", "launching collectives"),
    ("wait_s", "waiting for collectives"),
    ("rest_s", "optimiser"),
)


@dataclass(frozen=True)
class Step:
    """One step of a system on one rank; seconds of the wall clock unless a name says `cpu`.

    Attributes:
        system: `raf` or `lancet`, with ` alone` where the collectives exchanged nothing.
        same_s, own_s, launch_s, wait_s, rest_s: of `step_s`, as `PARTS` has it; `..._cpu_s`: of the rank's main thread
            on a core in them.
        others_cpu_s: of the rank's other threads, gloo's.
        sent_bytes: that left the node, by its NIC's counter; NaN where nobody counted.
    """

    pair: int
    system: str
    rank: int
    step_s: float
    same_s: float
    own_s: float
    launch_s: float
    wait_s: float
    rest_s: float
    same_cpu_s: float
    own_cpu_s: float
    launch_cpu_s: float
    wait_cpu_s: float
    others_cpu_s: float
    sent_bytes: float


@dataclass(frozen=True)
class Gain:
    """How many times as fast Lancet is: the median of the pairs' ratios with a bootstrap interval of 95 %."""

    median: float
    low: float
    high: float
    pairs: int
    faster: int


@dataclass(frozen=True)
class Measured:
    """Everything that was found; `facts` are the settings, plans and expectations, as the JSON file has them."""

    steps: Sequence[Step]
    facts: Mapping[str, Any]

    def slowest(self, system: str, name: str = "step_s") -> np.ndarray:
        """[pairs] of the slowest rank."""
        ranks = 1 + max(step.rank for step in self.steps)
        own = sorted((s for s in self.steps if s.system == system), key=lambda s: (s.pair, s.rank))
        return np.array([getattr(step, name) for step in own]).reshape(-1, ranks).max(axis=1)

    def mean(self, system: str, name: str) -> float:
        """Over pairs and ranks, so that parts add up."""
        found = np.array([getattr(step, name) for step in self.steps if step.system == system])
        return float(np.nanmean(found)) if not np.isnan(found).all() else float("nan")

    @property
    def gain(self) -> Gain:
        """Of Lancet over RAF."""
        ratio = self.slowest(RAF) / self.slowest(LANCET)
        source = np.random.default_rng(SEED)
        medians = np.median(ratio[source.integers(0, len(ratio), (DRAWS, len(ratio)))], axis=1)
        low, high = np.percentile(medians, INTERVAL)
        return Gain(float(np.median(ratio)), float(low), float(high), len(ratio), int((ratio > 1).sum()))

    def exposed(self, system: str) -> float:
        """Median seconds that the rank which waits longest waits in a step."""
        return float(np.median(self.slowest(system, "wait_s")))

    @property
    def share(self) -> float:
        """Of RAF's step that communication is exposed."""
        return self.exposed(RAF) / float(np.median(self.slowest(RAF)))

    def cores_share(self, system: str) -> float:
        """Of the cores that the ranks keep busy in a step; at most 1, clocks being what they are."""
        busy_s = sum(self.mean(system, f"{kind}_cpu_s") for kind in ("same", "own", "launch", "wait", "others"))
        busy_s += self.mean(system, "rest_s")
        ranks = 1 + max(step.rank for step in self.steps)
        return min(1.0, busy_s * ranks / (self.facts["cores"] * self.mean(system, "step_s")))


def losses(measured: Measured) -> list[tuple[str, float]]:
    """Where what Lancet waits less goes: seconds by cause; the shorter waits less these is the shorter step."""

    def more(name: str, alone: bool) -> float:
        ending = ALONE if alone else ""
        return measured.mean(LANCET + ending, name) - measured.mean(RAF + ending, name)

    computing = ("same_s", "own_s")
    in_parts = sum(more(name, alone=True) for name in computing)
    beside = sum(more(name, alone=False) for name in computing) - in_parts
    return [
        ("computing in parts takes longer, with no data on the way", in_parts),
        ("computing takes longer beside collectives", beside),
        ("launching more collectives", more("launch_s", alone=False)),
        ("the rest", more("rest_s", alone=False)),
    ]


def write(measured: Measured, path: Path) -> None:
    """The steps as CSV at `path`, the facts as JSON beside it."""
    write_rows(measured.steps, path)
    path.with_suffix(".json").write_text(json.dumps(measured.facts, indent=1) + "\n")


def read(path: Path) -> Measured:
    """What `write` wrote."""
    return Measured(read_rows(Step, path), json.loads(path.with_suffix(".json").read_text()))


def markdown(measured: Measured) -> str:
    """The section of docs/accuracy.md."""
    parts = (_found, _expectations, _where, _why, _plan)
    return "\n\n".join(part(measured) for part in parts)


def _found(m: Measured) -> str:
    facts, gain = m.facts, m.gain
    low, high = SHARE_AIM
    aim = "met" if low <= m.share <= high else "missed"
    step_s = {name: float(np.median(m.slowest(name))) for name in (RAF, LANCET)}
    exposed_s = {name: m.exposed(name) for name in (RAF, LANCET)}
    return (
        f"`{facts['model']}`, {facts['batch_size']} sequences a rank, on {facts['size']} ranks whose nodes have a NIC "
        f"of {facts['nic_rate']}: both systems on the same ranks, {gain.pairs} pairs, in random order within each. "
        f"**Lancet is {gain.median:.3f} times as fast as RAF** (median of the pairs; 95 %: {gain.low:.3f} to "
        f"{gain.high:.3f}), faster in {gain.faster} of {gain.pairs}: {_ms(step_s[RAF])} against {_ms(step_s[LANCET])} "
        f"ms a step. Exposed communication, the time that a rank's calls wait, falls from {_ms(exposed_s[RAF])} to "
        f"{_ms(exposed_s[LANCET])} ms; of RAF's step it is {_percent(m.share)} (aim: {_percent(low)} to "
        f"{_percent(high)}, {aim})."
    )


def _expectations(m: Measured) -> str:
    """The gain as Lancet's cost model and the simulator expect it, beside the measured one."""
    lines = ["| | RAF ms | Lancet ms | gain | RAF waits ms | Lancet waits ms |", "|---|---|---|---|---|---|"]
    rows = [("Lancet's own cost model", m.facts["expected"]), ("the simulator, the very plans", m.facts["simulated"])]
    for title, of in rows:
        raf, lancet = of[RAF], of[LANCET]
        gain = f"{raf['step_s'] / lancet['step_s']:.3f}"
        if "gain" in of:
            gain += f" ({of['gain'][0]:.3f} to {of['gain'][1]:.3f})"
        cells = (raf["step_s"], lancet["step_s"], gain, raf["exposed_s"], lancet["exposed_s"])
        lines.append(f"| {title} | " + " | ".join(c if isinstance(c, str) else _ms(c) for c in cells) + " |")
    found = m.gain
    cells = [f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})", *(_ms(m.exposed(n)) for n in (RAF, LANCET))]
    steps = [_ms(float(np.median(m.slowest(name)))) for name in (RAF, LANCET)]
    lines.append("| **measured** | " + " | ".join([*steps, *cells]) + " |")
    return "\n".join(lines)


def _where(m: Measured) -> str:
    systems = (RAF, RAF + ALONE, LANCET, LANCET + ALONE)
    lines = ["| mean ms of a step | RAF | no exchange | Lancet | no exchange |", "|---|---|---|---|---|"]
    for name, title in (*PARTS, ("step_s", "**all**")):
        lines.append(f"| {title} | " + " | ".join(_ms(m.mean(system, name)) for system in systems) + " |")
    lines.append("| gloo's threads, on a core | " + " | ".join(_ms(m.mean(s, "others_cpu_s")) for s in systems) + " |")
    lines.append("| cores busy | " + " | ".join(_percent(m.cores_share(s)) for s in systems) + " |")
    calls, launches = m.facts["calls"], m.facts["launches"]
    for title, of in (("calls", calls), ("collectives", launches)):
        lines.append(f"| {title} | {of[RAF]} | {of[RAF]} | {of[LANCET]} | {of[LANCET]} |")
    return "\n".join(lines)


def _why(m: Measured) -> str:
    """Where the shorter waits go, in a sentence, and why others expect more."""
    less_s = m.mean(RAF, "wait_s") - m.mean(LANCET, "wait_s")
    left_s = m.mean(RAF, "step_s") - m.mean(LANCET, "step_s")
    parts = "; ".join(f"{name}: {_signed_ms(seconds)}" for name, seconds in losses(m))
    return (
        f"On average Lancet waits {_ms(less_s)} ms less, and its step is {_ms(left_s)} ms shorter. Between the two, in "
        f"ms: {parts}. *No exchange*: the same calls, whose collectives copy a rank's own data at once."
        f"\n\n{_in_turn(m)}"
    )


def _in_turn(m: Measured) -> str:
    """Whether collectives of one group wait for each other, as both models have it."""
    seen = m.facts["together_s"]
    in_turn_s = seen["all_reduce"] + seen["all_to_all"]
    text = (
        f"An all-to-all of {seen['nbytes'] / 2**20:.1f} MiB takes {_ms(seen['all_to_all'])} ms here, an all-reduce of "
        f"as much {_ms(seen['all_reduce'])}; launched behind such an all-reduce the all-to-all is there after "
        f"{_ms(seen['behind'])} ms."
    )
    if seen["behind"] > SHARED * in_turn_s:
        return f"{text} So collectives go one after another, as Lancet's cost model and the simulator have it."
    return (
        f"{text} One after another they would take {_ms(in_turn_s)}: gloo carries several collectives at a time, where "
        "Lancet's cost model and the simulator have one communication stream, as NCCL has. RAF, whose exchanges stand "
        "behind sums of gradients in that stream, waits less on gloo than either expects, and so gains less by Lancet."
    )


def _plan(m: Measured) -> str:
    """What Lancet put into parts."""
    lines = [f"- {line}" for line in m.facts["told"] if "parts: " in line]
    return "\n".join(["Ranges in parts, with the times that Lancet expected:", "", *(lines or ["- none"])])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def _signed_ms(seconds: float) -> str:
    return f"{1e3 * seconds:+.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
