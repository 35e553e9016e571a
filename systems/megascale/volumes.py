"""What travels, by the paper's formulas: elements that a rank sends in the forward (Eqs 1 to 4, 10, Fig 4).

b sequences, s positions of each, h model, n ranks of a node, m query heads a key-value head, k choices. The printed
Eq 2, and what Fig 4 says of `cp`, are twice what a rank sends; Eqs 1, 3 and 4 are what it sends. `printed` and `sent`
keep the two apart.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """b, s, h, n, m and k.

    Raises:
        ValueError: one is below 1.
    """

    batch: int
    sequence: int
    d_model: int
    ranks: int
    gqa_ratio: float
    top_k: int

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "d_model", "ranks", "gqa_ratio", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")

    @property
    def elements(self) -> int:
        """b s h."""
        return self.batch * self.sequence * self.d_model

    @property
    def others(self) -> float:
        """(n - 1) / n: the share of what is divided among the ranks that goes to others."""
        return (self.ranks - 1) / self.ranks


def printed(sizes: Sizes, what: str) -> float:
    """Elements by the formula as printed: `attention-tp` (Eq 1), `-sp` (Eq 2), `-cp`, `-dp` (Fig 4), `experts-ep-a2a`
    (Eq 3), `-tp` (Eq 4), `-ep-ag`.

    Raises:
        ValueError: another name.
    """
    both = 2 * sizes.elements * sizes.others
    formulas = {
        "attention-tp": both,
        "attention-sp": both * (2 + 2 / sizes.gqa_ratio) / sizes.ranks,
        "attention-cp": both * 2 / sizes.gqa_ratio,
        "attention-dp": 0.0,
        "experts-ep-a2a": 2 * sizes.top_k / sizes.ranks * sizes.elements * sizes.others,
        "experts-tp": both,
        "experts-ep-ag": both,
    }
    if what not in formulas:
        raise ValueError(f"no formula for {what!r}; choose one of {', '.join(formulas)}")
    return formulas[what]


def sent(sizes: Sizes, what: str) -> float:
    """Elements that a rank sends in the forward under balanced routing; half of what is printed for `sp` and `cp`.

    Raises:
        ValueError: as `printed`.
    """
    return printed(sizes, what) / (2 if what in ("attention-sp", "attention-cp") else 1)


def crossover(ranks: int, all_to_all_rate: float = 1.0, gather_rate: float = 1.0) -> float:
    """The k at which an all-to-all of k rows a token takes as long as an all-gather of all tokens.

    With equal rates it is n, the rule as printed; a slower all-to-all moves it down (Fig 7: beyond 6 of 8).

    Args:
        all_to_all_rate, gather_rate: bytes a second that a rank sends in each.

    Raises:
        ValueError: no ranks, a rate that is not positive.
    """
    if ranks < 1 or all_to_all_rate <= 0 or gather_rate <= 0:
        raise ValueError(f"ranks = {ranks}, rates {all_to_all_rate} and {gather_rate}: all must be positive")
    return ranks * all_to_all_rate / gather_rate


def experts_by(top_k: int, ranks: int, all_to_all_rate: float = 1.0, gather_rate: float = 1.0) -> str:
    """`ep-ag` where more choices than the crossover would travel, else `ep-a2a` (section 3.2)."""
    return "ep-ag" if top_k > crossover(ranks, all_to_all_rate, gather_rate) else "ep-a2a"


def overlap_ratio(d_ffn: int, bandwidth: float, peak: float, ranks: int) -> float:
    """R = time of the experts' products over that of their rows on the links; above 1 they can hide (Eqs 5 to 9).

    Bytes of an element and operations of a multiply-add, two each, cancel for BF16.

    Args:
        bandwidth: bytes a second that a rank sends.
        peak: operations a second.

    Raises:
        ValueError: a single rank, which sends nothing, or rates that are not positive.
    """
    if ranks < 2 or d_ffn < 1 or bandwidth <= 0 or peak <= 0:
        raise ValueError(f"d_ffn = {d_ffn}, bandwidth = {bandwidth}, peak = {peak}, ranks = {ranks}: too small")
    return 1.5 * d_ffn * bandwidth / peak * ranks / (ranks - 1)


def sync_ratio(ranks: int, replicas: int, inside: float, between: float) -> float:
    """Time between nodes over time inside one when attention's replicated weights are synchronised (Eq 10).

    Args:
        replicas: d, data-parallel copies.
        inside, between: bytes a second of a rank in its node and beyond it.

    Raises:
        ValueError: fewer than two ranks, no replica, rates that are not positive.
    """
    if ranks < 2 or replicas < 1 or inside <= 0 or between <= 0:
        raise ValueError(f"ranks = {ranks}, replicas = {replicas}, rates {inside} and {between}: too small")
    return inside / between * (replicas - 1) / (replicas * (ranks - 1))
