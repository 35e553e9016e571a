"""Which exchanges a claim is about: its points under each assumption, and the names that papers give to exchanges.

What a claim does not say of where it was measured is an assumption: the node type, and the payload (which `params` of a
model whose shape is not known leaves open too). What it does say
(`bytes=1e3..2e8`, `gpus=<256`, `node_type=...`) is its scope, over which it is judged as a whole.
"""

from dataclasses import dataclass
from itertools import product

from moebench.cases.exchanges import is_default
from moebench.claims.finding import WORDS
from moebench.claims.reported import Claim, exchanges
from moebench.claims.scope import CantAnswer, experiment_of, is_everything, is_size, named
from moebench.workloads.exchange import EXCHANGES, size_words
from moebench.workloads.suite import ExchangeExperiment, Suite

SPEEDUPS = ("collective_speedup", "min_collective_speedup", "max_collective_speedup", "mean_collective_speedup")
GAIN = "communication_gain"  # a speedup less 1
_KEYS = ("node_type", "nodes", "gpus_per_node", "gpus", "bytes", "dtype", "params")


@dataclass(frozen=True)
class Point:
    """One case without its exchange."""

    topology: str
    payload_bytes: int
    dtype: str


@dataclass(frozen=True)
class Choice:
    """What is assumed where a claim is silent; empty where it is not.

    Attributes:
        gpu: node type. payload: of a rank.
    """

    gpu: str = ""
    payload: str = ""
    is_default: bool = True

    @property
    def labels(self) -> dict[str, str]:
        """The choice as text, by the name of what is assumed."""
        return {name: text for name, text in (("gpu", self.gpu), ("payload", self.payload)) if text}


def exchanges_of(claim: Claim, suite: Suite) -> ExchangeExperiment:
    """The experiment of a claim that this query can answer."""
    experiment = experiment_of(claim, suite)
    if not isinstance(experiment, ExchangeExperiment):
        raise CantAnswer(f"experiment {experiment.name} is not about exchanges")
    if claim.metric not in (*SPEEDUPS, GAIN) and not (claim.relation == "finding" and claim.value in WORDS):
        raise CantAnswer(f"no query for the metric {claim.metric} yet")
    return experiment


def sides_of(claim: Claim) -> tuple[str, str]:
    """The exchange that a claim is about, and the one that it is compared with."""
    sides = tuple(exchanges().get(name, name) for name in (claim.system, claim.baseline))
    unbuilt = [name for name, side in zip((claim.system, claim.baseline), sides) if side not in EXCHANGES]
    if unbuilt:
        raise CantAnswer(f"needs {', '.join(unbuilt) or 'a baseline'}, not built yet")
    return sides[0], sides[1]


def conditions(claim: Claim, experiment: ExchangeExperiment) -> list[tuple[Choice, list[Point]]]:
    """The claim's points under each assumption, default first.

    Raises:
        CantAnswer: the scope names what the experiment doesn't have.
    """
    for key, value in claim.scope.items():
        if key not in _KEYS and not is_everything(key, value):
            raise CantAnswer(f"no experiment here is organised by {key} ({key}={value})")
    names_machine = "node_type" in claim.scope
    topologies = experiment.topologies if names_machine else super(ExchangeExperiment, experiment).topologies
    places = [name for name in topologies if _is_place(claim, name)]
    payloads = [size for size in experiment.payloads_bytes if named(claim, "bytes", (size,))]
    dtypes = [dtype for dtype in experiment.dtypes if named(claim, "dtype", (dtype,))]
    for what, kept in (("topology", places), ("payload", payloads), ("dtype", dtypes)):
        if not kept:
            raise CantAnswer(f"experiment {experiment.name} has no {what} of the claim's scope")
    gpus = [""] if names_machine else list(dict.fromkeys(_node_type(name) for name in places))
    sizes = [0] if "bytes" in claim.scope or is_everything(*_scope(claim)) else payloads
    found = []
    for gpu, size in product(gpus, sizes):
        own = [name for name in places if gpu in ("", _node_type(name))]
        points = [Point(*one) for one in product(own, [size] if size else payloads, dtypes)]
        is_first = size in (0, experiment.payload_bytes) and (not gpu or is_default(experiment, own[0]))
        found.append((Choice(gpu, size_words(size) if size else "", is_first), points))
    return sorted(found, key=lambda pair: not pair[0].is_default)


def _scope(claim: Claim) -> tuple[str, str]:
    return "scope", claim.scope.get("scope", "")


def _node_type(topology: str) -> str:
    return topology.partition("-")[2]


def _is_place(claim: Claim, topology: str) -> bool:
    return is_size(claim, topology.partition("-")[0]) and named(claim, "node_type", (_node_type(topology),))
