"""What an embedding cut by columns sends and holds, by formula, beside one that every rank holds whole.

Bytes that one of R ranks sends to others; T tokens of each rank, V vocabulary, D model, e bytes of an element.
"""

from dataclasses import dataclass

ID_BYTES = 8
STATE_BYTES = 16  # of a parameter under Adam: fp16 parameter and gradient, fp32 copy and two moments


@dataclass(frozen=True)
class EmbeddingSizes:
    """T, V, D, R and e.

    Raises:
        ValueError: ranks, vocabulary or model below 1, tokens below 0.
    """

    tokens: int
    vocabulary: int
    d_model: int
    ranks: int
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name, least in (("tokens", 0), ("vocabulary", 1), ("d_model", 1), ("ranks", 1), ("element_bytes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {least}")

    @property
    def to_others(self) -> float:
        """(R - 1) / R: the share of what is divided among the ranks that goes to others."""
        return (self.ranks - 1) / self.ranks


def lookup_bytes(sizes: EmbeddingSizes) -> dict[str, float]:
    """Of the three all-to-alls: ids, rows, their gradients."""
    rows = sizes.tokens * sizes.d_model * sizes.element_bytes * sizes.to_others
    return {"ids": ID_BYTES * sizes.tokens * (sizes.ranks - 1), "rows": rows, "gradients": rows}


def head_bytes(sizes: EmbeddingSizes, way: str) -> float:
    """Of a tied head, forward and backward.

    Args:
        way: `columns` (rows and partial logits, and their gradients) or `gather` (the table twice, its gradient once).
    """
    if way == "gather":
        return 3 * sizes.vocabulary * sizes.d_model * sizes.element_bytes * sizes.to_others
    logits = sizes.tokens * sizes.vocabulary * (sizes.ranks - 1)
    return 2 * sizes.element_bytes * (sizes.tokens * sizes.d_model * sizes.to_others + logits)


def cheaper_head(sizes: EmbeddingSizes) -> str:
    """The way of a tied head that sends less: `columns` where 2 T (D + R V) is below 3 V D."""
    return min(("columns", "gather"), key=lambda way: head_bytes(sizes, way))


def all_reduce_bytes(sizes: EmbeddingSizes) -> float:
    """Of the gradient of a whole table, summed by a ring: what the cut replaces."""
    return 2 * sizes.vocabulary * sizes.d_model * sizes.element_bytes * sizes.to_others


def saved_bytes(sizes: EmbeddingSizes) -> float:
    """Memory that a rank saves under Adam."""
    return STATE_BYTES * sizes.vocabulary * sizes.d_model * sizes.to_others
