"""What a person would say about where a case's time goes, and why one case beats another: sentences, a list each.

Apart from moebench.explain.case, which finds the facts, so that wording can change without touching a number.
"""

from moebench.explain.case import OTHER_STAGES, Breakdown, Comparison, OperatorPart
from moebench.quantities import a, amount, memory, times

LEAST_SHARE = 0.0005  # smaller shares would be written as 0.0 %

def words(found: Breakdown, top: int = 3) -> list[str]:
    """What a person would say about a case, a sentence each."""
    said = [f"{found.case} takes {times(found.step_s)} {a(found.what)}{_interval(found)}."]
    fits = "It" if found.fits else "It does not fit into the device's memory: it"
    said.append(f"{fits} holds {memory(found.peak_bytes)} at its peak.")
    if found.step_s <= 0:
        return said
    least = LEAST_SHARE * found.step_s
    parts = [f"{part.region} {_share(part.time_s, found.step_s)}" for part in found.regions if part.time_s > least]
    said.append(f"By region: {', '.join(parts)}.")
    stages_s = sum(part.exposed_s for part in found.operators if part.name == OTHER_STAGES)
    waits = [
        f"{_share(time_s, found.step_s)} of the {found.what} waits for {what}"
        for time_s, what in (
            (found.total("exposed_s") - stages_s, "communication that nothing hides"),
            (stages_s, "other stages of the pipeline"),
            (found.total("host_s"), "the host to issue operators"),
        )
        if time_s > least
    ]
    said += [f"{wait}." for wait in waits] or ["Next to nothing of it waits for communication or for the host."]
    largest = [_phrase(part, found.step_s) for part in found.operators[:top] if part.time_s > 0]
    said.append(f"Most time goes to {'; '.join(largest)}.")
    if found.moved_by:
        name, correlation = next(iter(found.moved_by.items()))
        way = "longer" if correlation > 0 else "shorter"
        said.append(
            f"Of the uncertain parameters, {name} moves it most: the higher, the {way} "
            f"(rank correlation {correlation:.2f})."
        )
    said.extend(f"Note: {note}." for note in found.notes)
    return said


def difference_words(found: Comparison, top: int = 3) -> list[str]:
    """What one case does that the other doesn't, and which operators make the difference, a sentence each."""
    names = labels(found)
    slow, fast = (found.first, found.second) if found.delta_s >= 0 else (found.second, found.first)
    gap = abs(found.delta_s)
    ratio = f"{slow.step_s / fast.step_s:.2f} times as long as" if fast.step_s > 0 else "longer than"
    said = [
        f"{names[slow.case]} takes {times(slow.step_s)} {a(slow.what)}, {ratio} {names[fast.case]} with "
        f"{times(fast.step_s)}: {times(gap)} more."
    ]
    said += [
        f"{names[case.case]} does not fit into the device's memory: it needs {memory(case.peak_bytes)} at its peak."
        for case in (slow, fast)
        if not case.fits
    ]
    if gap > 0:
        sign = 1 if found.delta_s >= 0 else -1
        regions = [f"{d.label} {_signed(sign * d.delta_s)}" for d in found.regions if abs(d.delta_s) > 0.005 * gap]
        said.append(f"By region, the slower less the faster: {', '.join(regions)}.")
        made = [f"{d.label} {_signed(sign * d.delta_s)}" for d in found.operators[:top] if d.delta_s]
        said.append(f"The operators that make most of the difference: {'; '.join(made)}.")
    for one, other, chosen in ((found.first, found.second, "first"), (found.second, found.first, "second")):
        alone = _only(found, chosen)
        if alone:
            listed = "; ".join(_phrase(part, one.step_s) for part in alone[:top])
            spent = times(sum(part.time_s for part in alone))
            said.append(
                f"Only {names[one.case]} runs operators worth {spent} that {names[other.case]} doesn't: {listed}."
            )
    said.append(_totals(found, names))
    return said


def labels(found: Comparison) -> dict[str, str]:
    """Short names of the two cases: what differs in them; whole names where that says nothing."""
    first, second = found.first.case.split("/"), found.second.case.split("/")
    if len(first) != len(second) or first == second:
        return {case.case: case.case for case in (found.first, found.second)}
    differing = [i for i, (a, b) in enumerate(zip(first, second)) if a != b]
    return {"/".join(parts): "/".join(parts[i] for i in differing) for parts in (first, second)}


def _only(found: Comparison, which: str) -> list[OperatorPart]:
    """Operators that one case runs and the other doesn't, longest first; those that cost nothing are left out."""
    other = "second" if which == "first" else "first"
    alone = [getattr(d, which) for d in found.operators if getattr(d, other) is None]
    return sorted((part for part in alone if part.time_s > 0), key=lambda part: -part.time_s)


def _totals(found: Comparison, names: dict[str, str]) -> str:
    pairs = []
    for field, unit, what in (
        ("flops", "FLOP", "computation"),
        ("device_bytes", "B", "traffic in device memory"),
        ("sent_bytes", "B", "payload of collectives"),
    ):
        first, second = found.first.total(field), found.second.total(field)
        same = "the same" if first == second else f"{amount(first, unit)} against {amount(second, unit)}"
        pairs.append(f"{what} {same}")
    return f"A rank of {names[found.first.case]}, against one of {names[found.second.case]}: {', '.join(pairs)}."


def _phrase(part: OperatorPart, step_s: float) -> str:
    """`aten::bmm in dispatch, backward (2 calls, 210 ms, 26 %, 1.1 TFLOP, bound by compute)`."""
    facts = [f"{part.calls} call{'s' if part.calls > 1 else ''}", times(part.time_s), _share(part.time_s, step_s)]
    if part.flops:
        facts.append(amount(part.flops, "FLOP"))
    if part.sent_bytes:
        facts.append(f"sends {amount(part.sent_bytes, 'B')}")
    elif part.device_bytes:
        facts.append(f"moves {amount(part.device_bytes, 'B')}")
    if part.exposed_s > max(part.compute_s, part.host_s):
        facts.append("exposed communication")
    elif part.host_s > part.compute_s:
        facts.append("bound by the host")
    elif part.limit != "none":
        facts.append(f"bound by {'its fixed cost' if part.limit == 'fixed' else part.limit}")
    return f"{part.name} in {part.region}, {part.phase} ({', '.join(facts)})"


def _interval(found: Breakdown) -> str:
    if found.low_s == found.high_s:
        return ""
    return f" (5 to 95 % of the draws: {times(found.low_s)} to {times(found.high_s)})"


def _share(part_s: float, whole_s: float) -> str:
    return f"{100 * part_s / whole_s:.1f} %"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{times(abs(seconds))}"
