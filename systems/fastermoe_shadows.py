"""What FasterMoE lets a user set, and its predictor: for which experts shadowing pays.

E experts, D model, F feed-forward; B rows of the busiest expert that is not shadowed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from moebench.workloads.errors import InputError, one_of

ELEMENT_BYTES = 4  # of a row's element and of a parameter, whatever the layer's dtype


@dataclass(frozen=True)
class Settings:
    """The package's environment variables. Its defaults describe the machine whatever it runs on.

    Attributes:
        group: ranks of a group of the smart schedule; FMOE_FASTER_GROUP_SIZE.
        shadows: whether experts are shadowed; FMOE_FASTER_SHADOW_ENABLE.
        network_gbit_per_s: between ranks; FMOE_FASTER_GLBPLC_NETBW, there in bytes.
        products_tflops: of matrix products; FMOE_FASTER_GLBPLC_GPUTP, there in FLOP/s.
        alpha: F / D of a two-layer expert; FMOE_FASTER_GLBPLC_ALPHA.
    """

    group: int = 4
    shadows: bool = True
    network_gbit_per_s: float = 50.0
    products_tflops: float = 11.5
    alpha: float = 2.0

    def __post_init__(self) -> None:
        for name in ("group", "network_gbit_per_s", "products_tflops", "alpha"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} = {getattr(self, name)}: must be positive")

    @property
    def label(self) -> str:
        """`+group=2+shadows=false`: what is not at its default."""
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        return "".join(f"+{name}={str(getattr(self, name)).lower()}" for name in changed)

    def time_s(self, busiest_rows: int, shadowed: int, d_model: int) -> float:
        """Seconds of a layer, forward and backward: T = 3 c B + 4 t B + n m (section 4 of the paper).

        c: two products of a row, in the forward once and in the backward twice; t: a row sent, there and back, twice;
        m: an expert's parameters sent.

        Args:
            busiest_rows: B.
            shadowed: n.
        """
        weights = self.alpha * d_model**2  # of one product
        bytes_per_s = self.network_gbit_per_s * 1e9 / 8
        row_products_s = 4 * weights / (self.products_tflops * 1e12)
        row_sent_s = d_model * ELEMENT_BYTES / bytes_per_s
        expert_sent_s = 2 * weights * ELEMENT_BYTES / bytes_per_s
        return (3 * row_products_s + 4 * row_sent_s) * busiest_rows + shadowed * expert_sent_s

    def shadowed(self, loads_E: Sequence[int], d_model: int) -> tuple[int, ...]:
        """Experts to shadow, ascending: the busiest one after another, as long as that makes T smaller; never all.

        Args:
            loads_E: rows of all ranks for each expert, as the paper means it. The package at HEAD adds up the other
                axis, finds all loads equal, and shadows nobody.
        """
        ordered = sorted(range(len(loads_E)), key=lambda expert: -loads_E[expert])
        best_s, chosen = self.time_s(loads_E[ordered[0]], 0, d_model), 0
        for count in range(1, len(ordered)):
            time_s = self.time_s(loads_E[ordered[count]], count, d_model)
            if time_s >= best_s:
                break
            best_s, chosen = time_s, count
        return tuple(sorted(ordered[:chosen]))


def settings_of(options: Mapping[str, str]) -> Settings:
    """Settings from text.

    Raises:
        InputError: an option that there is not, or a value that is refused.
    """
    kinds: dict[str, type] = {f.name: type(f.default) for f in fields(Settings)}
    for name in options:
        if name not in kinds:
            raise one_of("option of system fastermoe", name, kinds)
    try:
        values: dict[str, Any] = {name: _value(name, text, kinds[name]) for name, text in options.items()}
        return Settings(**values)
    except InputError as error:
        raise InputError(f"system fastermoe: {error}") from None


def _value(name: str, text: str, kind: type) -> bool | int | float:
    try:
        return {"true": True, "false": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        what = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise InputError(f"{name} is {what}, not {text!r}") from None
