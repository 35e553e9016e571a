"""What `moebench plan` says of a plan: the fastest settings, how far that is decided, why not the others."""

from collections import Counter
from typing import Any

import numpy as np

from moebench.cli.tables import chosen, fitting, output_width, table_lines, wrapped
from moebench.planner.describe import mfu, options_of
from moebench.planner.exact import Settled
from moebench.planner.search import MEMORY, NUMBERS, Plan, Ranked, Rejected
from moebench.planner.space import Question, Refused, Setting, settings
from moebench.report.parts import number, percent
from moebench.sim.job import JobTime
from moebench.sim.room import GIGA
from moebench.sim.rows import INTERVAL

COLUMNS = ("#", "system", "n", "PP", "VPP", "DP", "mb", "tokens/s", "5–95 %", "MFU", "GB", "fits", "bubble", "best")
SPARE = ("bubble", "GB", "MFU", "5–95 %", "fits", "DP")  # what a narrow terminal does without, the first ones first
MEANINGS = {
    "n": "ranks that share a layer (TP, SP, EP)",
    "PP": "stages",
    "VPP": "chunks of a stage",
    "DP": "replicas",
    "mb": "sequences of a micro-batch",
    "GB": "of the fullest rank",
    "fits": "share of the draws in which its memory suffices",
    "bubble": "share of the time of all stages in which they compute no micro-batch, the sums of gradients and the "
    "update among it",
    "best": "share of the draws in which it is the fastest",
}
LISTED = 6  # reasons that are told of settings that can't run


def counted(question: Question) -> tuple[dict[str, Any], str]:
    """How many settings there are, and how many have numbers that do not go: as a document, and as a line."""
    found = list(settings(question))
    refused = sum(isinstance(one, Refused) for one in found)
    systems = len(question.names())
    line = (
        f"{_many(len(found), 'setting')} of {_many(systems, 'system')} with options, of which {refused:,} can't run "
        "for their numbers; nothing was traced"
    )
    return _asked(question) | {"settings": len(found), "systems": systems, "cant_run": refused}, line


def lines(found: Settled, top: int, has_rejected: bool) -> list[str]:
    """The plan as text, at the output's width."""
    width, plan = output_width(), found.plan
    text = [*_heading(plan, width), ""]
    if found.best is None:
        text.append("No setting fits." if any(one.cause == MEMORY for one in plan.rejected) else "No setting can run.")
    else:
        text += [*_table(plan, top, width), "", *_decided(found, found.best, width)]
    return text + _why_not(plan, width, has_rejected)


def _heading(plan: Plan, width: int) -> list[str]:
    question = plan.question
    model, topology = question.decoder, question.topology
    what = (
        f"{model.title}, {model.parameters / GIGA:.3g}B parameters, on {topology.name} ({topology.ranks} x "
        f"{topology.hardware.title}): steps of {question.global_batch:,} sequences of {model.sequence:,} tokens"
    )
    causes = Counter(one.cause for one in plan.rejected)
    counts = [
        f"{len(plan.ranked):,} ranked",
        f"{len(plan.left_out):,} can't be best",
        f"{causes[MEMORY]:,} do not fit",
        f"{sum(causes.values()) - causes[MEMORY]:,} can't run",
    ]
    return [wrapped(what, width), wrapped(f"{_many(plan.tried, 'setting')}: {', '.join(counts)}", width)]


def _table(plan: Plan, top: int, width: int) -> list[str]:
    systems = {one.setting.system.partition("+")[0] for one in plan.ranked[:top]}
    rows = [_row(plan, place, one, len(systems) > 1) for place, one in enumerate(plan.ranked[:top])]
    columns = [name for name in COLUMNS if name != "fits" or any(one.fits < 1 for one in plan.ranked[:top])]
    kept = fitting(columns, chosen(COLUMNS, rows, columns), SPARE, width)
    right = [name for name in COLUMNS if name != "system"]
    found = table_lines(kept, chosen(COLUMNS, rows, kept), right)
    if len(systems) == 1:
        found.insert(0, f"Settings of {next(iter(systems))}:")
    legend = ". ".join(f"{name}: {meaning}" for name, meaning in MEANINGS.items() if name in kept)
    return [*found, wrapped(f"{legend}.", width)]


def _row(plan: Plan, place: int, one: Ranked, has_system: bool) -> list[str]:
    setting, layout = one.setting, one.setting.layout
    tokens = plan.tokens / one.step_s
    drawn = tokens[1:][tokens[1:] > 0]  # those in which it fits
    spread = "{:.0f}–{:.0f}k".format(*np.percentile(drawn, INTERVAL) / 1e3) if len(drawn) else "–"
    sure = plan.band.draws > 0
    return [
        str(place + 1) + ("=" if place in plan.band.undecided and place and sure else " "),
        options_of(setting.system, has_system),
        str(setting.spread.ranks),
        str(layout.stages),
        str(layout.chunks),
        str(setting.spread.replicas * setting.spread.ranks // setting.spread.sharing),
        str(layout.micro_batch),
        f"{tokens[0] / 1e3:,.1f}k",
        spread,
        f"{100 * mfu(plan, one):.1f} %",
        f"{one.memory.total / GIGA:.1f}",
        percent(one.fits),
        percent(one.bubble),
        percent(plan.band.best[place]) if sure else "–",
    ]


def _decided(found: Settled, best: JobTime, width: int) -> list[str]:
    """Whether the first one is the fastest for sure, and where its time goes."""
    step_s = float(best.timeline.time_s[0])
    split = {name: percent(float(np.ravel(value)[0]) / step_s) for name, value in best.split().items()}
    whole = (
        f"The first one's step takes {number(step_s, 4)} s: matrix products and attention {split['products_s']}, waits "
        f"for collectives {split['exposed_s']}, for other stages {split['bubble_s']}, the rest {split['rest_s']}. "
        f"{_traced(found)}"
    )
    return [wrapped(band_sentence(found.plan), width), wrapped(whole, width)]


def _traced(found: Settled) -> str:
    """Which ones were traced whole, and what that changed."""
    which = "It is" if found.traced == 1 else f"It and {_many(found.traced - 1, 'other')} that may be first are"
    if found.moved < 5e-5:
        return f"{which} traced whole, which changed nothing."
    return f"{which} traced whole, which moved them by at most {100 * found.moved:.2f} %."


def band_sentence(plan: Plan) -> str:
    """How far the ranking is decided."""
    band = plan.band
    if not band.draws:
        return "Without draws of the uncertain parameters nobody knows how far the order is decided."
    tied = len(band.undecided)
    best = f"the first is the fastest in {percent(band.best[0])} of {band.draws} draws of the uncertain parameters"
    if tied == 1:
        if len(plan.ranked) + len(plan.left_out) == 1:
            return f"Decided: {best}, and the only one."
        return f"Decided: {best}, and faster than each other one in at least 90 % of those in which it fits."
    return (
        f"Not decided among {tied} settings (the others marked =): the first is faster than each of the others in less "
        f"than 90 % of the draws in which it fits; {best}."
    )


def _why_not(plan: Plan, width: int, is_whole: bool) -> list[str]:
    found: list[str] = []
    if plan.left_out:
        first, nearest = plan.ranked[0], plan.left_out[0]
        more = float(nearest.floor_s[0]) / first.time_s - 1
        found += ["", wrapped(
            f"{_many(len(plan.left_out), 'setting')} can't be best: their micro-batches alone take longer, at least "
            f"{100 * more:.1f} %, such as {named(nearest.setting)}. Whether all of them fit was not looked at.", width,
        )]  # fmt: skip
    found += [wrapped(line, width) for line in _others(plan)]
    if is_whole:
        return [*found, "", *(f"{_place(one)}: {one.reason}" for one in plan.rejected)]
    memory = [one for one in plan.rejected if one.cause == MEMORY]
    if memory:
        nearest_one = min(memory, key=lambda one: one.over_bytes)
        found += ["", wrapped(
            f"{len(memory):,} do not fit. The nearest, {_place(nearest_one)}: {nearest_one.reason}.", width
        )]  # fmt: skip
    others = Counter(one.reason for one in plan.rejected if one.cause != MEMORY)
    if others:
        found += ["", f"{_many(sum(others.values()), 'setting')} can't run:"]
        found += [wrapped(f"{count:,} x {reason}", width, "  ") for reason, count in others.most_common(LISTED)]
        rest = others.total() - sum(count for _, count in others.most_common(LISTED))
        if rest:
            found.append(f"  {rest:,} {'other' if rest == 1 else 'others'}; --rejected lists all")
    return found


def _others(plan: Plan) -> list[str]:
    """How far the systems are behind of which no setting is ranked."""
    ranked = {_stem(one.setting) for one in plan.ranked}
    said = []
    for stem in dict.fromkeys(name.partition("+")[0] for name in plan.question.systems):
        own = [one for one in plan.left_out if _stem(one.setting) == stem]
        if stem not in ranked and own:
            more = float(own[0].floor_s[0]) / plan.ranked[0].time_s - 1
            said.append(f"{stem} is at least {100 * more:.1f} % slower, with {named(own[0].setting)}.")
    return said


def _stem(setting: Setting) -> str:
    return setting.system.partition("+")[0]


def named(setting: Setting) -> str:
    """`NAME+ranks=4, PP 4, VPP 2, mb 1`."""
    return _named(setting.system, setting.layout.stages, setting.layout.chunks, setting.layout.micro_batch)


def _place(one: Rejected) -> str:
    layout = one.refused.layout
    return _named(one.refused.system, layout.stages, layout.chunks, layout.micro_batch)


def _named(system: str, stages: int, chunks: int, micro_batch: int) -> str:
    return f"{system}, PP {stages}, VPP {chunks}, mb {micro_batch}"


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _asked(question: Question) -> dict[str, Any]:
    return {
        "model": question.decoder.name,
        "topology": question.topology.name,
        "global_batch": question.global_batch,
        "sequence": question.decoder.sequence,
        "dtype": question.dtype,
    }


def document(found: Settled) -> dict[str, Any]:
    """The plan as one JSON object: every setting, ranked ones first."""
    plan, best = found.plan, found.best
    return _asked(plan.question) | {
        "draws": plan.band.draws,
        "best_traced_whole_s": None if best is None else float(best.timeline.time_s[0]),
        "traced_whole": found.traced,
        "moved_by_at_most": found.moved,
        "settings": [
            *(_ranked_object(plan, place, one) for place, one in enumerate(plan.ranked)),
            *(
                _setting_object(one.setting) | {"status": "can't be best", "at_least_s": float(one.floor_s[0])}
                for one in plan.left_out
            ),
            *(_rejected_object(one) for one in plan.rejected),
        ],
    }


def _ranked_object(plan: Plan, place: int, one: Ranked) -> dict[str, Any]:
    drawn = one.step_s[1:][np.isfinite(one.step_s[1:])]
    low, high = map(float, np.percentile(drawn, INTERVAL)) if len(drawn) else (None, None)
    needs = ("parameters", "gradients", "states", "activations", "transient", "total")
    return _setting_object(one.setting) | {
        "status": "ranked",
        "rank": place + 1,
        "step_s": one.time_s,
        "step_low_s": low,
        "step_high_s": high,
        "tokens_per_s": plan.tokens / one.time_s,
        "mfu": mfu(plan, one),
        "bubble": one.bubble,
        "share_fits": one.fits,
        "share_best": plan.band.best[place],
        "share_slower_than_first": plan.band.slower[place],
        "is_undecided": place in plan.band.undecided,
        "fullest_stage": one.memory.stage,
        "memory_bytes": {name: float(getattr(one.memory, name)) for name in needs},
    }


def _setting_object(setting: Setting) -> dict[str, Any]:
    layout, spread = setting.layout, setting.spread
    return {
        "system": setting.system,
        "ranks": spread.ranks,
        "stages": layout.stages,
        "chunks": layout.chunks,
        "replicas": spread.replicas,
        "sharing": spread.sharing,
        "micro_batch": layout.micro_batch,
        "micro_batches": spread.microbatches,
    }


def _rejected_object(one: Rejected) -> dict[str, Any]:
    layout = one.refused.layout
    keys = {"system": one.refused.system, "stages": layout.stages, "chunks": layout.chunks}
    keys |= {"micro_batch": layout.micro_batch}
    known = keys if one.setting is None else _setting_object(one.setting)
    over = {"over_bytes": one.over_bytes} if one.cause == MEMORY else {}
    status = {MEMORY: "does not fit", NUMBERS: "does not divide"}.get(one.cause, "can't run")
    return known | {"status": status, "reason": one.reason} | over
