"""Hit rates of cache policies for expert states, on Zipf and recorded routing, over cache sizes and tokens a step.

    python -m benchmarks.storage_policies            # compares with results/measured/storage-policies.csv
    python -m benchmarks.storage_policies --write    # replaces it

A count of what a routing asks for: the same on every machine. Four layers of 64 experts, two choices a token, 60 steps
of which the first 10 do not count. `forward` asks once a step and expert, as inference does, `training` in the forward,
the backward and the update. `drift` is Zipf with another popularity from every 15th step on; `recorded` are
routers of gate topk-2, one a layer, trained here on tokens that come in clusters.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from benchmarks.rows_csv import read_rows, write_rows
from moebench.systems.moesys.policies import make_policy
from moebench.systems.moesys.policy_study import (
    Steps,
    clairvoyant_hit_rate,
    experts_used,
    hit_rate,
    in_training,
    joined,
    prediction,
    steps_of,
)
from moebench.workloads.layer import GateSpec, LayerWorkload, RoutingSpec
from moebench.workloads.routing import logits_for

TABLE = Path(__file__).parent.parent / "results" / "measured" / "storage-policies.csv"
LAYERS, EXPERTS, TOP_K, STEPS, WARM, DRIFT = 4, 64, 2, 60, 10, 15
ROUTINGS = ("zipf-0.5", "zipf-1.0", "zipf-1.5", "drift-1.5", "recorded")
TOKENS = (4, 16, 64, 512)
SHARES = (0.125, 0.25, 0.5, 0.75)  # of all states, that the cache holds
TRAINING_TOKENS, TRAINING_SHARES = (16, 512), (0.25, 0.5)
FILLS: dict[str, str | float] = {"fallback": "least"}
POLICIES: dict[str, dict[str, str | float]] = {
    "lru": {},
    "lfu": {},
    "moesys": {},
    "moesys, no decay": {"decay": 1.0},
    "moesys, fills": FILLS,
    "moesys, protects": {"victim": "least-above-threshold"},
    "moesys, protects, fills": {"victim": "least-above-threshold", **FILLS},
}
CLAIRVOYANT = "clairvoyant"


@dataclass(frozen=True)
class Line:
    """One cell.

    Attributes:
        used: share of a layer's experts that a step needs.
        recall, precision: of bringing what the step before needed.
    """

    routing: str
    passes: str
    tokens: int
    used: float
    recall: float
    precision: float
    share: float
    policy: str
    hit_rate: float


def logits_of(routing: str, tokens: int) -> list[Tensor]:
    """Of every layer."""
    if routing == "recorded":
        from moebench.imports.routing import of_gate

        return [of_gate(f"topk-{TOP_K}", EXPERTS, tokens, seed=layer).logits_TE for layer in range(LAYERS)]
    kind, alpha = routing.split("-")
    parts = STEPS // DRIFT if kind == "drift" else 1

    def one(layer: int, part: int) -> Tensor:
        where = RoutingSpec("zipf", seed=100 * layer + part, alpha=float(alpha))
        return logits_for(LayerWorkload(GateSpec("topk", TOP_K), 1, tokens // parts, 64, 64, EXPERTS, routing=where), 0)

    return [joined([one(layer, part) for part in range(parts)]) for layer in range(LAYERS)]


def lines_of(routing: str, passes: str, tokens: int, steps: Steps) -> Iterator[Line]:
    """Every policy and size on one sequence of requests."""
    used, found = experts_used(steps, EXPERTS, LAYERS), prediction(steps)
    if passes == "training":
        steps = in_training(steps)
    for share in SHARES if passes == "forward" else TRAINING_SHARES:
        capacity = round(share * LAYERS * EXPERTS)
        rates = {name: hit_rate(steps, make_policy(name.split(",")[0], capacity, **options), WARM)
                 for name, options in POLICIES.items()}  # fmt: skip
        rates[CLAIRVOYANT] = clairvoyant_hit_rate(steps, capacity, WARM)
        for name, rate in rates.items():
            yield Line(routing, passes, tokens, used, found.recall, found.precision, share, name, rate)


def measured(routings: tuple[str, ...] = ROUTINGS, tokens: tuple[int, ...] = TOKENS) -> list[Line]:
    """All lines of some routings and sizes of step."""
    lines = []
    for routing in routings:
        for size in tokens:
            steps = steps_of(logits_of(routing, STEPS * size), TOP_K, size)
            for passes in ("forward", "training") if size in TRAINING_TOKENS else ("forward",):
                lines += lines_of(routing, passes, size, steps)
    return lines


def shown(lines: list[Line]) -> str:
    """A table for the terminal: hit rates by policy, a line for each routing, step and size."""
    names = [*POLICIES, CLAIRVOYANT]
    rates = {(line.routing, line.passes, line.tokens, line.share, line.policy): line for line in lines}
    head = f"{'routing':<9} {'passes':<8} {'tokens':>6} {'used':>5} {'recall':>6} {'cache':>6}  "
    rows = [head + "  ".join(f"{name:>5}" for name in names)]
    for place in dict.fromkeys((line.routing, line.passes, line.tokens, line.share) for line in lines):
        one, (routing, passes, tokens, share) = rates[*place, CLAIRVOYANT], place
        cells = "  ".join(f"{rates[*place, name].hit_rate:>{max(len(name), 5)}.3f}" for name in names)
        at = f"{routing:<9} {passes:<8} {tokens:>6} {one.used:>5.2f} {one.recall:>6.2f} {share:>6.3f}"
        rows.append(f"{at}  {cells}")
    return "\n".join(rows)


def main() -> int:
    """Print the table; write it, or say whether the stored one is still right."""
    parser = argparse.ArgumentParser(description="Hit rates of cache policies for expert states.")
    parser.add_argument("--write", action="store_true", help=f"replace {TABLE.name}")
    write = parser.parse_args().write
    lines = measured()
    print(shown(lines))
    if write:
        write_rows(lines, TABLE)
        return 0
    same = TABLE.is_file() and all(is_same(a, b) for a, b in zip(lines, read_rows(Line, TABLE), strict=True))
    print("as stored" if same else f"{TABLE} has other numbers")
    return 0 if same else 1


def is_same(found: Line, stored: Line) -> bool:
    """Equal, numbers to what another version of torch may round otherwise."""
    numbers = ("used", "recall", "precision", "hit_rate")
    keys = ("routing", "passes", "tokens", "share", "policy")
    near = all(abs(getattr(found, name) - getattr(stored, name)) < 0.01 for name in numbers)
    return near and all(getattr(found, name) == getattr(stored, name) for name in keys)


if __name__ == "__main__":
    raise SystemExit(main())
