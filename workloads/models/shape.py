"""Sizes of a GPT-2 with Mixture-of-Experts layers, those of the Lancet paper among them. Plain data, no torch.

B sequences of a rank, S tokens of a sequence, T = B S, D model, F feed-forward, H heads, V vocabulary, E experts over
all ranks, R ranks, L = E / R experts of a rank, K choices a token.
"""

from dataclasses import dataclass, field, replace

from moebench.workloads.conventions import Conventions
from moebench.workloads.layer import ACTIVATIONS, GateSpec

GATES = ("switch", "topk", "bpr")
ATTENTIONS = ("scores", "fused")
OPTIMIZERS = ("sgd", "adamw")
# C = floor(cf x ceil(T / E)), and no auxiliary loss: what the paper's models train with.
MODEL_CONVENTIONS = Conventions(capacity_rule="k-times-floor", auxiliary=0.0)


@dataclass(frozen=True, slots=True)
class GPT2MoEShape:
    """A decoder as GPT-2, where blocks 0, `moe_every`, 2 `moe_every`, ... have experts in place of the dense FFN.

    Attributes:
        layers, d_model, heads, d_ffn: of the transformer; the d_ffn is that of the experts.
        dense_ffn: of blocks without experts; 0: as wide as an expert.
        experts: E over all ranks.
        batch_size, sequence: B and S of one rank.
        vocabulary, positions: rows of the two embeddings; the output head is the first of them.
        activation: of the experts; dense blocks take GELU.
        attention: `scores` in plain operators that keep them, as the paper's frameworks had it; `fused`, one operator.
        optimizer: `sgd` without momentum, or `adamw` with masters and moments in FP32.
        recompute: whether a block keeps its input alone, and the backward runs it once more.
        clip_norm: norm of all gradients above which they are scaled down; 0: they are not.
        conventions: rule of capacity, minimum and alignment, order of the queue.
    """

    layers: int
    d_model: int
    heads: int
    d_ffn: int
    experts: int
    batch_size: int
    sequence: int = 512
    gate: GateSpec = field(default_factory=lambda: GateSpec("switch"))
    capacity_factor: float = 1.0
    moe_every: int = 2
    dense_ffn: int = 0
    vocabulary: int = 50257
    positions: int = 1024
    activation: str = "relu"
    attention: str = "scores"
    optimizer: str = "sgd"
    recompute: bool = False
    clip_norm: float = 0.0
    conventions: Conventions = MODEL_CONVENTIONS

    @property
    def tokens(self) -> int:
        """T, tokens of a rank."""
        return self.batch_size * self.sequence

    @property
    def capacity(self) -> int:
        """C, slots of each (source rank, expert)."""
        return self.conventions.capacity(self.tokens, self.experts, self.gate.top_k, self.capacity_factor)

    @property
    def moe_blocks(self) -> tuple[int, ...]:
        """Which blocks have experts."""
        return tuple(range(0, self.layers, self.moe_every))

    @property
    def dense_width(self) -> int:
        """F of blocks without experts."""
        return self.dense_ffn or self.d_ffn

    @property
    def shared_parameters(self) -> int:
        """Parameters that every rank holds alike: all but the experts'."""
        d_model, d_ffn, sparse = self.d_model, self.dense_width, len(self.moe_blocks)
        attention = 4 * d_model * d_model + 4 * d_model
        norms = 4 * d_model
        dense = 2 * d_model * d_ffn + d_ffn + d_model
        embeddings = (self.vocabulary + self.positions) * d_model
        router = d_model * self.experts
        in_blocks = self.layers * (attention + norms) + (self.layers - sparse) * dense + sparse * router
        return embeddings + in_blocks + 2 * d_model

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer."""
        return 2 * self.d_model * self.d_ffn + self.d_ffn + self.d_model

    def parameters(self, ranks: int = 1) -> int:
        """Parameters that one of R ranks holds."""
        return self.shared_parameters + len(self.moe_blocks) * self.experts // ranks * self.expert_parameters

    def least_bytes(self, ranks: int = 1) -> int:
        """What a training step in fp32 holds at least on one of R ranks.

        Weights and gradients; what each block keeps for the backward (inputs, outputs and hidden values of its parts,
        probabilities of attention); logits and their gradients.
        """
        of_token = 12 * self.d_model + (self.heads * self.sequence if self.attention == "scores" else 0)
        kept = self.tokens * (self.layers * of_token + 2 * self.vocabulary)
        return 4 * (2 * self.parameters(ranks) + kept)

    def problem(self, ranks: int) -> str | None:
        """Why this model has no meaning on R ranks, naming the sizes; None when it has one."""
        at_least_one = ("layers", "d_model", "heads", "d_ffn", "experts", "batch_size", "sequence", "moe_every")
        for name in (*at_least_one, "vocabulary", "positions"):
            if getattr(self, name) < 1:
                return f"{name} = {getattr(self, name)}: must be at least 1"
        if self.dense_ffn < 0:
            return f"dense_ffn = {self.dense_ffn}: must not be negative"
        if self.d_model % self.heads:
            return f"d_model = {self.d_model} is not divisible by heads = {self.heads}"
        if self.experts % ranks:
            return f"experts = {self.experts} is not divisible by ranks = {ranks}"
        if self.sequence > self.positions:
            return f"sequence = {self.sequence} is longer than positions = {self.positions}"
        if self.gate.name not in GATES:
            return f"gate {self.gate.name}: the model has {', '.join(GATES)}"
        if not 1 <= self.gate.top_k <= self.experts:
            return f"top_k = {self.gate.top_k} must be between 1 and experts = {self.experts}"
        if self.conventions.is_dropless:
            return "capacity_rule unlimited: the model's shapes would follow its data"
        if self.activation not in ACTIVATIONS[:2]:
            return f"activation = {self.activation!r}: choose one of {', '.join(ACTIVATIONS[:2])}"
        if self.attention not in ATTENTIONS:
            return f"attention = {self.attention!r}: choose one of {', '.join(ATTENTIONS)}"
        if self.optimizer not in OPTIMIZERS:
            return f"optimizer = {self.optimizer!r}: choose one of {', '.join(OPTIMIZERS)}"
        if not self.clip_norm >= 0:
            return f"clip_norm = {self.clip_norm}: must not be negative"
        if self.capacity_factor <= 0 or self.capacity < 1:
            return f"capacity_factor = {self.capacity_factor} leaves no slot for {self.tokens} tokens"
        return None


def gpt2_s_moe(ranks: int, batch_size: int, gate: GateSpec | None = None) -> GPT2MoEShape:
    """GPT2-S-MoE (Lancet, arXiv 2404.19429, section 7): 12 layers of 768, 16 heads, two experts a GPU.

    The artifact trains it with 48 sequences a GPU on A100 and 16 on V100; the text swaps A100's with those of L.
    """
    shape = GPT2MoEShape(12, 768, 16, 4 * 768, 2 * ranks, batch_size)
    return shape if gate is None else replace(shape, gate=gate)


def gpt2_l_moe(ranks: int, batch_size: int, gate: GateSpec | None = None) -> GPT2MoEShape:
    """GPT2-L-MoE: 24 layers of 1024, 16 heads, two experts a GPU; 24 sequences a GPU on A100 and 8 on V100."""
    shape = GPT2MoEShape(24, 1024, 16, 4 * 1024, 2 * ranks, batch_size)
    return shape if gate is None else replace(shape, gate=gate)


def gpt_4096_moe(ranks: int, batch_size: int, gate: GateSpec | None = None) -> GPT2MoEShape:
    """MoESys' models of 13.9 to 207.2 billion parameters (PaddleFleetX): 12 layers of 4096, 64 heads, an expert a GPU.

    Sequences of 1,024 tokens, Adam, recomputation and clipping are those of the repository's scripts.
    """
    shape = GPT2MoEShape(
        12, 4096, 64, 4 * 4096, ranks, batch_size, sequence=1024, moe_every=1, vocabulary=50304, activation="gelu",
        optimizer="adamw", recompute=True, clip_norm=1.0,
    )  # fmt: skip
    return shape if gate is None else replace(shape, gate=gate)


def gpt_58b_moe(ranks: int, batch_size: int, gate: GateSpec | None = None) -> GPT2MoEShape:
    """A model of 58.2 billion parameters with 32 experts, of which MoESys' inference says no more than that: a guess.

    Widths and depths that are usual have that number once: 48 layers of 4096, every other one with experts, which are
    half as wide as a dense FFN. Heads are those of MoESys' other models, positions are 2,048.
    """
    shape = GPT2MoEShape(
        48, 4096, 64, 2 * 4096, 32, batch_size, sequence=1024, dense_ffn=4 * 4096, vocabulary=50304, positions=2048,
        activation="gelu",
    )  # fmt: skip
    return shape if gate is None else replace(shape, gate=gate)
