"""Sizes of decoder-only models with Mixture-of-Experts layers: the layer, the model, parameters by closed form.

Plain data, no torch.

D model, H query heads, G key-value heads, F feed-forward of an expert, E experts, K choices a token, V vocabulary.
"""

from dataclasses import dataclass, field

NORMS = ("rms", "layer")  # `layer`: with a bias
QK_NORMS = ("none", "head", "full")  # over each head, or over all heads of a token together
BIASES = ("qkv", "out", "experts", "router", "head")


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """One decoder layer: pre-norm attention with rotary positions and grouped heads, then SwiGLU experts.

    Attributes:
        shared_ffn: F of the experts that every token takes, together; 0 for none.
        renormalises: whether a token's weights sum to 1.
        qk_norm: whether queries and keys are normed head by head.
    """

    d_model: int
    heads: int
    kv_heads: int
    head_size: int
    d_ffn: int
    experts: int
    top_k: int
    shared_ffn: int = 0
    renormalises: bool = True
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    eps: float = 1e-5

    @property
    def queries(self) -> int:
        """Columns of all query heads."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Columns of all key heads, as many as of all value heads."""
        return self.kv_heads * self.head_size

    @property
    def attention_parameters(self) -> int:
        """Of the four projections, and the norms of heads."""
        head_norms = 2 * self.head_size if self.qk_norm else 0
        return self.d_model * (2 * self.queries + 2 * self.keys) + head_norms

    @property
    def expert_parameters(self) -> int:
        """Of one expert."""
        return 3 * self.d_model * self.d_ffn

    @property
    def parameters(self) -> int:
        """Of the layer: attention, two norms, router, experts, shared expert."""
        experts = self.experts * self.expert_parameters + 3 * self.d_model * self.shared_ffn
        return self.attention_parameters + 2 * self.d_model + self.d_model * self.experts + experts

    @property
    def active_parameters(self) -> int:
        """Those that a token meets."""
        return self.parameters - (self.experts - self.top_k) * self.expert_parameters

    def problem(self) -> str | None:
        """Why such a layer has no meaning, naming the sizes; None when it has one."""
        for name in ("d_model", "heads", "kv_heads", "head_size", "d_ffn", "experts", "top_k"):
            if getattr(self, name) < 1:
                return f"{name} = {getattr(self, name)}: must be at least 1"
        if self.shared_ffn < 0:
            return f"shared_ffn = {self.shared_ffn}: must not be negative"
        if self.heads % self.kv_heads:
            return f"heads = {self.heads} is not divisible by kv_heads = {self.kv_heads}"
        if self.head_size % 2:
            return f"head_size = {self.head_size}: rotary positions need an even one"
        if self.top_k > self.experts:
            return f"top_k = {self.top_k} must be between 1 and experts = {self.experts}"
        return None


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): queries and key-value pairs through narrow products.

    Attributes:
        query_rank, kv_rank: widths in between.
        nope_size, rope_size: parts of a query or key head without and with rotary positions; value_size: of a value.
    """

    query_rank: int
    kv_rank: int
    nope_size: int
    rope_size: int
    value_size: int

    def parameters(self, d_model: int, heads: int) -> int:
        """Products and the norms of the two narrow vectors."""
        queries = d_model * self.query_rank + self.query_rank * (1 + heads * (self.nope_size + self.rope_size))
        keys = d_model * (self.kv_rank + self.rope_size)
        values = self.kv_rank * (1 + heads * (self.nope_size + self.value_size))
        return queries + keys + values + heads * self.value_size * d_model


@dataclass(frozen=True, slots=True)
class Published:
    """What its authors say of a model.

    Attributes:
        parameters, active: None where they did not say.
        active_has_embedding: whether they count the embedding among the active ones.
    """

    parameters: float | None = None
    active: float | None = None
    active_has_embedding: bool = True
    source: str = ""


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """A stack of layers between an embedding and an output head.

    Attributes:
        dense_layers, dense_ffn: how many of the layers have a dense SwiGLU in place of experts, and its F.
        tied: whether the head is the embedding.
        norm: one of `NORMS`; qk_norm: one of `QK_NORMS`.
        biases: those of `BIASES` that it has; sinks: a number a head that stands among the scores.
        latent: attention that is not grouped heads.
        features: what else the model's layers do, in words.
        sequence: that it was trained with, as far as known.
    """

    name: str
    title: str
    layers: int
    shape: DecoderShape
    vocabulary: int
    sequence: int = 8192
    dense_layers: int = 0
    dense_ffn: int = 0
    tied: bool = False
    norm: str = "rms"
    qk_norm: str = "none"
    biases: tuple[str, ...] = ()
    sinks: bool = False
    latent: LatentAttention | None = None
    features: tuple[str, ...] = ()
    published: Published = field(default_factory=Published)

    @property
    def not_expressed(self) -> tuple[str, ...]:
        """What of this model `DecoderShape` does not say, in words; empty where the layer is the model's own."""
        found = (
            (self.latent is not None, "latent attention"),
            (bool(self.dense_layers), f"{self.dense_layers} dense layer{'s' * (self.dense_layers > 1)}"),
            (self.norm == "layer", "layer norms with biases"),
            (self.qk_norm == "full", "norms over all heads together"),
            (bool({"qkv", "out"} & set(self.biases)), "biases of attention"),
            (bool({"experts", "router"} & set(self.biases)), "biases of router or experts"),
            (self.sinks, "attention sinks"),
        )
        return (*(word for is_there, word in found if is_there), *self.features)

    @property
    def parameters(self) -> int:
        """All of them."""
        sparse, dense = self.layers - self.dense_layers, self.dense_layers
        return sparse * self._sparse(self.shape.experts) + dense * self._dense() + self._outside()

    @property
    def active_parameters(self) -> int:
        """Those that a token meets in products: without the look-up of its embedding, with the output head."""
        sparse, dense = self.layers - self.dense_layers, self.dense_layers
        outside = self.vocabulary * self.shape.d_model
        return sparse * self._sparse(self.shape.top_k) + dense * self._dense() + outside + self._norm()

    def _norm(self) -> int:
        return self.shape.d_model * (2 if self.norm == "layer" else 1)

    def _attention(self) -> int:
        shape = self.shape
        if self.latent is not None:
            return self.latent.parameters(shape.d_model, shape.heads)
        norms = (self.qk_norm == "full") * (shape.queries + shape.keys)  # those of single heads are the shape's
        biases = ("qkv" in self.biases) * (shape.queries + 2 * shape.keys) + ("out" in self.biases) * shape.d_model
        return shape.attention_parameters + norms + biases + self.sinks * shape.heads

    def _sparse(self, experts: int) -> int:
        """A layer of which so many experts count."""
        shape = self.shape
        biases = ("experts" in self.biases) * (2 * shape.d_ffn + shape.d_model)
        router = (shape.d_model + ("router" in self.biases)) * shape.experts
        ffn = router + experts * (shape.expert_parameters + biases) + 3 * shape.d_model * shape.shared_ffn
        return self._attention() + 2 * self._norm() + ffn

    def _dense(self) -> int:
        return self._attention() + 2 * self._norm() + 3 * self.shape.d_model * self.dense_ffn

    def _outside(self) -> int:
        """Embedding, head, last norm."""
        rows = self.vocabulary * (1 if self.tied else 2)
        return rows * self.shape.d_model + ("head" in self.biases) * self.vocabulary + self._norm()
