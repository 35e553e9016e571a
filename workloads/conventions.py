"""What differs between systems that implement the same routing rule, as data.

Two systems compute the same function only under the same Conventions. `COMMON` is the set under which systems are
compared; each system also declares its own, `as shipped`.
"""

import math
from dataclasses import dataclass

CAPACITY_RULES = (
    "k-times-ceil",  # k x ceil(cf x T / E): COMMON, HetuMoE
    "ceil-of-product",  # ceil(k x cf x T / E): DeepSpeed, Megatron
    "k-times-floor",  # k x floor(cf x ceil(T / E)): Tutel
    "floor-of-product",  # floor(k x ceil(cf x T) / E): FastMoE's GShard gate
    "unlimited",  # dropless: the largest count over experts and ranks
)
DROP_ORDERS = (
    "arrival",  # later tokens are dropped
    "random",  # a random subset survives (random token selection)
    "probability",  # the lowest router probabilities are dropped
)
CHOICE_ORDERS = (
    "choice-major",  # every first choice takes its slot before any second choice
    "token-major",  # all choices of a token before the next token
)
NORMALISATIONS = (
    "none",
    "before-drop",  # weights divided by the sum over the k choices
    "after-drop",  # ... by the sum over the choices that were kept
)
NOISES = (
    "none",
    "input-jitter",  # the gate's input times U(1 - 0.01, 1 + 0.01) (Switch, DeepSpeed Jitter)
    "gumbel-second",  # the second expert is the argmax of logits + Gumbel(0, 1) (DeepSpeed top-2)
    "random-second",  # the second expert is used with probability min(1, 2 x its weight) (GShard)
    "gumbel",  # Gumbel(0, 1) is added to all logits before the softmax (Dense-to-Sparse)
)
WEIGHT_SITES = (
    "output",
    "before-second-product",  # between activation and second product (Megatron)
    "before-first-product",  # the expert's input (Tutel's is_postscore=False)
)


@dataclass(frozen=True, slots=True)
class Conventions:
    """How a system reads a routing rule; see the tuples above for the choices of each field.

    Attributes:
        name: `common` or `as-shipped`.
        min_capacity: least slots per expert.
        alignment: slots per expert are rounded up to a multiple of it.
        auxiliary: value of the auxiliary loss at perfect balance; 0 leaves it out.
        gate_dtype: dtype in which logits are computed and softmax is taken.
    """

    name: str = "common"
    capacity_rule: str = "k-times-ceil"
    min_capacity: int = 0
    drop_order: str = "arrival"
    choice_order: str = "choice-major"
    normalisation: str = "none"
    noise: str = "none"
    auxiliary: float = 1.0
    weight_site: str = "output"
    gate_dtype: str = "fp32"
    alignment: int = 1

    def __post_init__(self) -> None:
        for field, value, choices in (
            ("capacity_rule", self.capacity_rule, CAPACITY_RULES),
            ("drop_order", self.drop_order, DROP_ORDERS),
            ("choice_order", self.choice_order, CHOICE_ORDERS),
            ("normalisation", self.normalisation, NORMALISATIONS),
            ("noise", self.noise, NOISES),
            ("weight_site", self.weight_site, WEIGHT_SITES),
        ):
            if value not in choices:
                raise ValueError(f"{field} is {value!r}; choose one of {', '.join(choices)}")
        if self.alignment < 1:
            raise ValueError(f"alignment is {self.alignment}: must be at least 1")

    @property
    def is_random(self) -> bool:
        """Whether two runs on the same input may keep different tokens."""
        return self.noise != "none" or self.drop_order == "random"

    @property
    def is_dropless(self) -> bool:
        """Whether capacity follows the tokens."""
        return self.capacity_rule == "unlimited"

    def capacity(self, tokens: int, experts: int, top_k: int, capacity_factor: float) -> int:
        """Slots per (source rank, expert) for T = `tokens` tokens of a rank.

        Raises:
            ValueError: under `unlimited`, where capacity is read from the routing.
        """
        if self.is_dropless:
            raise ValueError("a dropless layer has no capacity before the tokens are routed")
        share = capacity_factor * tokens / experts
        if self.capacity_rule == "k-times-ceil":
            slots = top_k * _ceil(share)
        elif self.capacity_rule == "k-times-floor":
            slots = top_k * -_ceil(-capacity_factor * -(-tokens // experts))
        elif self.capacity_rule == "floor-of-product":
            slots = top_k * _ceil(capacity_factor * tokens) // experts
        else:
            slots = _ceil(top_k * share)
        return self.aligned(max(self.min_capacity, slots))

    def aligned(self, slots: int) -> int:
        """The next multiple of `alignment`."""
        return -(-slots // self.alignment) * self.alignment


def _ceil(value: float) -> int:
    """Ceiling that forgives the last bits of a float product: 1.1 x 50 is 55, not 56."""
    return math.ceil(value - 1e-9 * max(1.0, abs(value)))


COMMON = Conventions()
