"""The routing rules by name: an explicit list; gates from their labels."""

from moebench.workloads.conventions import Conventions
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates.base import BASE
from moebench.workloads.gates.bpr import BPR
from moebench.workloads.gates.dense_to_sparse import DENSE_TO_SPARSE
from moebench.workloads.gates.expert_choice import EXPERT_CHOICE
from moebench.workloads.gates.gate import Gate
from moebench.workloads.gates.gshard import GSHARD
from moebench.workloads.gates.hash import HASH
from moebench.workloads.gates.ktop1 import KTOP1
from moebench.workloads.gates.sam import SAM
from moebench.workloads.gates.sigmoid import SIGMOID
from moebench.workloads.gates.sinkhorn import SINKHORN
from moebench.workloads.gates.switch import SWITCH
from moebench.workloads.gates.topk import TOPK
from moebench.workloads.layer import FIXED_TOP_K, GateSpec, OptionValue

__all__ = ["GATES", "Gate", "gate", "get_gate", "parse_label", "problem"]

GATES: dict[str, Gate] = {
    one.name: one
    for one in (
        *(SWITCH, GSHARD, TOPK, KTOP1, BASE, HASH, SAM, DENSE_TO_SPARSE),
        *(EXPERT_CHOICE, SIGMOID, BPR, SINKHORN),
    )
}


def get_gate(name: str) -> Gate:
    """The rule of a name.

    Raises:
        InputError: unknown name; lists the valid ones.
    """
    if name not in GATES:
        raise one_of("gate", name, GATES)
    return GATES[name]


def gate(name: str, top_k: int | None = None, **options: OptionValue) -> GateSpec:
    """The gate of a name, with the rule's own K and options where none are given.

    Raises:
        InputError: unknown gate or option, or a value that the rule refuses.
    """
    rule = get_gate(name)
    spec = GateSpec(name, rule.default_top_k if top_k is None else top_k, tuple(options.items()))
    return gate_options.canonical(rule.options, spec)


def parse_label(label: str, where: str = "") -> GateSpec:
    """The gate of a label: a name, or with K `topk-4`, or with options `sam-2+groups=4`.

    Raises:
        InputError: no such gate or option; says what there is.
    """
    place = f"{where}: " if where else ""
    name, *pairs = label.split("+")
    name, top_k = _name_and_k(name, label, where)
    options = []
    for pair in pairs:
        option, equals, value = pair.partition("=")
        if not equals:
            raise InputError(f"{place}gate {label!r}: write an option as +name=value, not {pair!r}")
        options.append((option, value))
    try:
        return gate(name, top_k, **gate_options.parse(GATES[name].options, name, options))
    except InputError as error:
        raise InputError(f"{place}{error}") from None


def _name_and_k(name: str, label: str, where: str) -> tuple[str, int | None]:
    """A label's first part: `topk-4` is topk and 4, `topk` and `dense-to-sparse` leave K open."""
    if name in GATES:
        return name, None
    stem, _, number = name.rpartition("-")
    is_number = number.isascii() and number.isdigit() and number[0] != "0" and len(number) <= 6
    if stem not in GATES or not is_number:
        raise one_of("gate", stem if stem and is_number else name, GATES, where)
    if stem in FIXED_TOP_K:
        place = f"{where}: " if where else ""
        free = next(one for one in GATES if one not in FIXED_TOP_K)
        raise InputError(f"{place}unknown gate {label!r}: {stem} takes no number; {free} does, such as {free}-{number}")
    return stem, int(number)


def problem(gate: GateSpec, conventions: Conventions, experts: int | None = None) -> str | None:
    """Why a gate has no meaning under these conventions, or with E = `experts`; None when it has one.

    Raises:
        InputError: unknown gate.
    """
    return get_gate(gate.name).problem(gate, conventions, experts)
