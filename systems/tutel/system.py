"""`tutel` as a registered system, and its variants: names with options."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from moebench.kernels.collectives.group import Group
from moebench.systems.layer import checked, refusal
from moebench.systems.tutel import choice
from moebench.systems.tutel.critical import NATIVE
from moebench.systems.tutel.layer import PHASES, Plan, TutelLayer
from moebench.workloads.conventions import Conventions
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.gates import bpr
from moebench.workloads.gates import options as gate_options
from moebench.workloads.layer import GateSpec, LayerWorkload

MOST_CHUNKS = 32  # AllToAllStatus.max_num_split
MOST_SHARERS = 4096  # a bound for what a name may say


@dataclass(frozen=True)
class Options:
    """What a variant's name fixes; None is chosen by the rules of moebench.systems.tutel.choice.

    Attributes:
        degree: chunks of an exchange.
        exchange: `flat` or `2d`.
        r: 0 gathers all weights, 1 sends tokens once; more where ranks share an expert.
    """

    degree: int | None = None
    exchange: str | None = None
    r: int | None = None

    @property
    def label(self) -> str:
        """`+degree=4+exchange=2d`."""
        named = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return "".join(f"+{name}={value}" for name, value in named if value is not None)


class Tutel:
    """Tutel, or a variant of it."""

    source = "arXiv 2206.03382; microsoft/tutel 82af7aa"

    def __init__(self, options: Options = Options()):
        self.options = options
        self.name = "tutel" + options.label
        self.title = "Tutel" + options.label.replace("+", ", ").replace("=", " ")

    def variant(self, options: Mapping[str, str]) -> "Tutel":
        """Tutel with `degree`, `exchange` or `r` fixed.

        Raises:
            InputError: another option, or a value that Tutel has not.
        """
        known = [field.name for field in fields(Options)]
        for name in options:
            if name not in known:
                raise one_of("option of system tutel", name, known)
        exchange = options.get("exchange")
        if exchange is not None and exchange not in PHASES:
            raise one_of("exchange of system tutel", exchange, PHASES)
        return Tutel(
            Options(_number(options, "degree", 1, MOST_CHUNKS), exchange, _number(options, "r", 0, MOST_SHARERS))
        )

    def supports(self, workload: LayerWorkload, conventions: Conventions) -> str | None:
        """None, or the reason why Tutel has no such layer."""
        gate, is_native = workload.gate, workload.gate.name in NATIVE
        supported: dict[str, tuple[str, ...]] = {
            "drop_order": ("arrival",),
            "normalisation": ("none", "before-drop"),
            "weight_site": ("output", "before-first-product"),
            "gate_dtype": ("fp32", "fp64"),
        }
        if not is_native or gate.top_k > 1:
            supported["choice_order"] = ("choice-major",)
        if is_native:
            supported["noise"] = ("none",)
            supported["normalisation"] = ("none", "before-drop") if gate.top_k > 1 else ("none",)
        reason = refusal(workload, conventions, "tutel", **supported)
        if reason is None and conventions.name == "as-shipped" and not is_shipped(gate):
            return f"the package has no gate {gate.label}; it runs under the common conventions"
        return reason

    def as_shipped(self, gate: GateSpec) -> Conventions:
        """The defaults of `tutel.moe.moe_layer`, with its option fp32_gate."""
        return Conventions(
            name="as-shipped",
            capacity_rule="k-times-floor",
            normalisation="before-drop" if gate.top_k > 1 else "none",
            alignment=self.options.degree or 1,
        )

    def ranks_problem(self, workload: LayerWorkload, ranks: int) -> str | None:
        """Why a fixed r has no meaning on so many ranks; None when it has one."""
        r, sharers = self.options.r, workload.sharers(ranks)
        if r and sharers % r:
            return f"tutel with r = {r}: must be 0 or divide the {sharers} rank(s) that share an expert"
        return None

    def build(
        self, workload: LayerWorkload, group: Group, conventions: Conventions, device: torch.device, dtype: torch.dtype
    ) -> TutelLayer:
        """The layer of this rank.

        Raises:
            InputError: the workload has no meaning on this group, or is not supported.
        """
        checked(self, workload, group, conventions)
        return TutelLayer(workload, group, conventions, device, dtype, self.plan(workload, group))

    def plan(self, workload: LayerWorkload, group: Group) -> Plan:
        """What the name fixes, and for the rest what the rules choose."""
        exchange = self.options.exchange or choice.exchange(workload, group)
        degree = self.options.degree or choice.degree(workload, group, exchange)
        r = self.options.r
        return Plan(degree, exchange, choice.parallelism(workload, group) if r is None else r)


def is_shipped(gate: GateSpec) -> bool:
    """Whether the package has the gate; it orders tokens by their largest probability."""
    return gate.name in NATIVE and (
        gate.name != "bpr" or gate.top_k == 1 or gate_options.read(bpr.Options, gate).importance == "largest"
    )


def _number(options: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most or text != str(int(text)):
        raise InputError(f"option {name} of system tutel is a whole number from {least} to {most}, not {text!r}")
    return int(text)


TUTEL = Tutel()
