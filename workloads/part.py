"""A part of a layer or of a training step, by itself on all ranks, as a workload. Plain data, no torch, no pydantic.

A part is what several systems may do in several ways: tokens to their experts and back, a product with the collective
next to it, a sum of gradients. How each is done is systems/part_registry.py's affair; here is what there is, and what
sizes each takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar

from moebench.workloads.part_routing import label_of

# Sizes of parts -> their letter in the name of a case.
SIZES: Mapping[str, str] = {
    "tokens": "t",  # of all ranks of a node together
    "d_model": "d",
    "top_k": "k",
    "products": "p",  # grouped products that follow a scatter: 2 with a gate's, 1 without
    "attention_mb": "a",  # megabytes (10^6) of attention's parameters of a rank
    "of_part": "q",  # 1 where those are of a rank that has a part of them, 0 where of one that has all
    "expert_mb": "e",  # megabytes of the experts' parameters of a rank
    "sent_percent": "s",  # how much of those megabytes a rank has to sum: 50 where they count FP32 and BF16 travels
    "vocabulary": "v",
    "sequences": "b",  # of a rank
    "prompt": "l",  # tokens of a sequence that are there
    "generated": "g",  # tokens of a sequence that are made
    "capacity_percent": "c",  # slots of all experts over routes
    "parameters": "n",  # gradients that a rank holds
    "steps": "s",
    "experts": "e",
    "layers": "l",
    "d_ffn": "f",
    "accumulated": "a",  # micro-batches to an update
    "turn_steps": "u",  # after so many steps others are popular; 0: never
    "passes": "p",  # that a step asks for its states in: 1 forward; 3 forward, backward and update
    "cache_sizes": "c",  # that are tried, evenly between none and all of the states
    "heads": "h",
    "positions": "p",  # of an image: its patches, and a class token
    "recomputed": "r",  # 1 where blocks are computed again in the backward, 0 where what they need of it is kept
}
MOST: Mapping[str, int] = {"sent_percent": 100}  # of sizes that are shares
MEGA = 10**6
BOUND, STEP_BEFORE = "clairvoyant", "step-before"  # of ways to have states at hand: what none exceeds; what is no cache


@dataclass(frozen=True, slots=True)
class Option:
    """What may stand behind a system's name, as in `chunked+chunks=4`.

    Attributes:
        default: where nothing does; None: the option is off.
        least: of a whole number.
        words: it is one of them, in place of a number.
    """

    default: int | str | None = None
    least: int = 1
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """What a suite may choose of a part.

    Attributes:
        what: it computes, a sentence.
        sizes: that it takes, all of them; a model's file says the others.
        systems: ways to do it, each with what it does.
        dtype: of what it works on, where a suite names no other.
        options: of each system that has any, by name.
        least_ranks: that it has a meaning on.
        of_model: whether its other sizes are those of a decoder; of_gpt: those of a model that trains.
        of_tasks: whether it works on several tasks, whose samples its `batches` are.
        is_studied: whether it is run for real on seeded numbers, and what becomes of them is counted: nothing is timed.
        counts: what is counted of it.
        has_routing: whether a suite says which experts its tokens choose.
    """

    what: str
    sizes: tuple[str, ...]
    systems: Mapping[str, str]
    dtype: str = "bf16"
    options: Mapping[str, Mapping[str, Option]] = field(default_factory=dict)
    least_ranks: int = 2
    of_model: bool = False
    of_gpt: bool = False
    of_tasks: bool = False
    is_studied: bool = False
    counts: str = "deviation"
    has_routing: bool = False

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those that a suite may name."""
        has_wider = self.dtype in ("bf16", "tf32") and not self.is_studied
        return (self.dtype, "fp32") if has_wider else (self.dtype,)


_OVERLAP = {
    "serial": "the product, then the collective, or the other way round",
    "chunked": "rows in chunks, each with a collective that runs beside the products of others; launched as they are",
    "fused": "the same in chunks of a tile, priced as one kernel and one collective: assumes a fused kernel",
}
_CHUNKS = {"chunked": {"chunks": Option(2)}}
_SUMS = {
    "fp32-reduce-scatter": "FP32 reduce-scatter",
    "bf16-all-to-all": "BF16 all-to-all, sums in FP32",
    "bf16-ring": "BF16 reduce-scatter, rounded at every hop",
}
_PARAMETERS = {
    "bf16-all-gather": "BF16 from FP32 masters",
    "fp8-all-gather": "FP8 codes with a scale for 128 elements, from FP32 masters",
}
_ROWS = {"bf16-reduce-scatter": "BF16 both ways", "fp8-all-to-all": "FP8 codes with scales both ways, sums in FP32"}
_SLOTS = {"slots": Option(), "limit_mib": Option(least=0)}
_GENERATION = ("sequences", "prompt", "generated", "top_k", "capacity_percent")
_CACHE = {
    "threshold": Option(2, least=0),
    "decay_percent": Option(50, least=0),
    "period": Option(256),
    "victim": Option("least-if-above", words=("least-if-above", "least-above-threshold")),
    "fallback": Option("bypass", words=("bypass", "least")),
}
_STORED = {
    "cache_percent": Option(50, least=0),  # of a rank's states, that its cache holds
    "slots": Option(4),  # of experts on the device
    "policy": Option("lru", words=("moesys", "lfu", "lru")),
}
_AHEAD = {
    "2d": "the next layer's slices and the experts that it had in the step before come while a layer works",
    "horizontal": "slices come ahead, an expert when its rows are there",
    "vertical": "experts come ahead, a layer's slices when it begins",
    "none": "slices and experts come when they are needed",
}
PARTS: Mapping[str, Part] = {
    "dispatch": Part(
        "Rows of tokens to the ranks of their experts, or all tokens to all ranks and their sums back: one collective",
        ("tokens", "d_model", "top_k"),
        {
            "all-to-all": "every rank sends each token's row to the ranks of its experts, as many to each",
            "all-gather": "every rank gets all tokens",
            "reduce-scatter": "every rank has a row for every token, and gets the sums of its own",
        },
    ),
    "qkv+a2a": Part(
        "Projection to query, key, value; all-to-all of heads", ("tokens",), _OVERLAP, options=_CHUNKS, of_model=True
    ),
    "a2a+outproj": Part(
        "All-to-all of heads; output projection", ("tokens",), _OVERLAP, options=_CHUNKS, of_model=True
    ),
    "ag+scatter+groupedgemm": Part(
        "All-gather of tokens, rows of this rank's experts, their first products",
        ("tokens", "products"), _OVERLAP, options=_CHUNKS, of_model=True,
    ),
    "groupedgemm+gather+rs": Part(
        "The experts' last product, sums of a token's rows, reduce-scatter", ("tokens",), _OVERLAP,
        options=_CHUNKS, of_model=True,
    ),
    "parameter-sync": Part(
        "Sums of a step's gradients over replicas, and everybody's parameters again",
        ("attention_mb", "expert_mb", "sent_percent", "of_part"),
        {
            "tp-attention": "attention's parameters cut over the ranks of a node: everything is summed along rails",
            "sp-attention": "every rank has all of attention's: summed inside a node too, beside what travels outside",
        },
    ),
    "embedding": Part(
        "Look-up of token embeddings and its gradient, of tokens that are another rank's own; tied: the logits too",
        ("tokens", "vocabulary", "d_model"),
        {
            "whole": "every rank has the whole table, whose gradient is summed over the ranks",
            "columns": "every rank has some columns: three all-to-alls, of ids, of rows and of their gradients",
            "whole-tied": "as whole, and the table is the output head",
            "columns-tied": "as columns; of the head, rows are exchanged by columns and partial logits are summed",
            "gathered-tied": "as columns; for the head, the table is gathered forward and backward",
        },
    ),
    "generation": Part(
        "Text from prompts, experts dealt to the ranks: the prompts of all sequences, then token after token",
        _GENERATION,
        {
            "moesys": "one operator a gate, rows moved to their experts' slots, experts as batched products",
            "deepspeed": "masks of the gate as one-hot tensors, rows moved by products with them, experts in turn; "
            "attention=scores writes all scores of attention to memory",
        },
        options={"deepspeed": {"attention": Option("fused", words=("fused", "scores"))}}, least_ranks=1, of_gpt=True,
    ),
    "generation-offloaded": Part(
        "Text from prompts, experts dealt to the ranks and in host memory, some slots of them on the GPU",
        _GENERATION,
        {
            "no-offload": "all experts are where the model computes",
            "synchronous": "a layer's experts are copied when they are needed, while nothing else runs",
            "moesys": "a ring: slots of a layer each, the next layers' experts are copied while one computes",
            "chosen": "slots of an expert each, filled with those that some token wants once the gate says so; ours",
        },
        options={"moesys": {**_SLOTS, "keep": Option(least=0)}, "chosen": _SLOTS}, least_ranks=1, of_gpt=True,
    ),
    "task-step": Part(
        "A training step of several tasks with unequal batches: a ViT in which each sample takes the network that all "
        "tasks share or its task's own",
        ("d_model", "layers", "heads", "positions", "recomputed"),
        {
            "moesys": "ranks in proportion to batches; a rank has the networks of its own tasks, whose gradients are "
            "summed over the ranks of that task; every rank reads a part of every task, and in every block rows go to "
            "the ranks of their task and back, as in VIMER-UFO's code; with rows=stay it reads its own tasks only",
            "even": "as moesys+rows=stay, with as many ranks for each task",
            "in-line": "as moesys+rows=stay, with the samples of all tasks in one line, cut into equal pieces: ours",
            "ddp": "every rank has all networks and a part of every task, and all gradients are summed over all ranks, "
            "as PyTorch's DistributedDataParallel does; with by=task ranks have one task each, as many for each",
        },
        dtype="tf32",
        options={
            "moesys": {"rows": Option("travel", words=("travel", "stay"))}, "ddp": {"by": Option(words=("task",))}
        },
        least_ranks=1, of_tasks=True,
    ),
    "gradient-sum": Part("The sum of gradients over replicas, a shard to each", ("parameters",), _SUMS, dtype="fp32"),
    "gradient-error": Part(
        "How far the sums of gradients are from exact ones", ("parameters",), _SUMS, dtype="fp32", is_studied=True
    ),
    "training": Part(
        "The losses of a small model that is trained with these sums", ("steps",), _SUMS, dtype="fp32", is_studied=True
    ),
    "parameter-gather": Part(
        "New parameters of all replicas from the shares that they update", ("parameters",), _PARAMETERS, dtype="fp32"
    ),
    "parameter-training": Part(
        "The losses of a small model whose products' weights are kept so", ("steps",), _PARAMETERS, dtype="fp32",
        is_studied=True,
    ),
    "row-sum": Part("Rows summed over ranks, a part to each, and their gradients back", ("tokens", "d_model"), _ROWS),
    "row-error": Part(
        "How far such sums, and their gradients, are from exact ones", ("tokens", "d_model"), _ROWS, is_studied=True
    ),
    "stored-step": Part(
        "A training step of blocks in ZeRO-3 slices, whose expert states are on disk, in a cache and in a GPU's slots",
        ("tokens", "d_model", "d_ffn", "experts", "top_k", "layers", "accumulated"), _AHEAD,
        options=dict.fromkeys(_AHEAD, _STORED), least_ranks=1, has_routing=True,
    ),
    "expert-cache": Part(
        "Requests of expert states that a cache answers, step after step: tokens ask for the experts they choose",
        ("tokens", "experts", "top_k", "layers", "steps", "turn_steps", "passes", "cache_sizes"),
        {
            "moesys": "a state stays by its hits, which decay; none leaves while the least has fewer than a threshold",
            "lfu": "the state with fewest hits leaves",
            "lru": "the state that was asked for longest ago leaves",
            BOUND: "the state whose next request is furthest leaves, or does not enter: no policy has more hits",
            STEP_BEFORE: "no cache: what each layer needed in the step before is brought, and counts where needed",
        },
        dtype="fp32", options={"moesys": _CACHE}, least_ranks=1, is_studied=True, counts="hit_rate", has_routing=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _OfPart:
    """What both kinds of case say of their part.

    Attributes:
        part: one of `PARTS`.
        model: name of the decoder whose sizes it has; empty where it has none.
        sizes: in the order of the part's own.
        seed: of its numbers, where there are any.
        routing: which experts its tokens choose (part_routing.py); empty where it has none.
        batches: samples of each task, of a part that has tasks.
    """

    part: str
    sizes: tuple[tuple[str, int], ...]
    model: str = ""
    dtype: str = "bf16"
    seed: int = 0
    routing: str = ""
    batches: tuple[int, ...] = ()

    kind: ClassVar[str] = "part"
    unit_of_work: ClassVar[str] = "part"
    issued_ahead: ClassVar[bool] = False

    def size(self, name: str) -> int:
        """One of its sizes."""
        return dict(self.sizes)[name]

    @property
    def shape(self) -> str:
        """`internal-352b-t8192-p2`, `zipf-1.5-t64-k1`; the dtype behind it where it is not the part's usual one."""
        unusual = [] if self.dtype == PARTS[self.part].dtype else [self.dtype]
        sizes = [f"{SIZES[name]}{n}" for name, n in self.sizes]
        named = [name for name in (self.model, label_of(self.routing), *batches_words(self.batches)) if name]
        return "-".join([*named, *sizes, *unusual])

    @property
    def labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The part and its shape before the topology, nothing after it."""
        return (self.part, self.shape), ()

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns of result rows that parts fill, and those of their sizes."""
        routing = label_of(self.routing) or None
        columns = {"part": self.part, "shape": self.shape, "model": self.model or None, "routing": routing}
        return columns | {"batches": "/".join(batches_words(self.batches)) or None} | dict(self.sizes)

    def problem(self, ranks: int) -> str | None:
        """Why it has no meaning on `ranks` ranks, naming the keys; None when it has one."""
        least = PARTS[self.part].least_ranks
        if ranks < least:
            return f"part {self.part} needs {least} ranks and more, not {ranks}"
        for name, size in self.sizes:
            if size < 0:
                return f"{name} = {size}: must not be negative"
            if size > MOST.get(name, size):
                return f"{name} = {size}: must be at most {MOST[name]}"
        return None


@dataclass(frozen=True, slots=True)
class PartWorkload(_OfPart):
    """One call of a part on all ranks."""

    metric: ClassVar[str] = "part_time"


@dataclass(frozen=True, slots=True)
class StudyWorkload(_OfPart):
    """What a part does to numbers, on real ranks of this machine, as few as `STUDY_RANKS`: nothing is timed."""

    @property
    def metric(self) -> str:
        """What is counted."""
        return PARTS[self.part].counts


def batches_words(batches: Sequence[int]) -> list[str]:
    """`512`, `256`, `2x128`: one after another, equal ones together."""
    return [f"{n}x{samples}" if (n := len(list(equal))) > 1 else f"{samples}" for samples, equal in groupby(batches)]


def workload_of(
    part: str,
    sizes: Mapping[str, int],
    model: str = "",
    seed: int = 0,
    dtype: str = "",
    routing: str = "",
    batches: Sequence[int] = (),
) -> PartWorkload | StudyWorkload:
    """The workload of a part and its sizes, others left out; without a dtype in the part's usual one."""
    one = PARTS[part]
    own = tuple((name, sizes[name]) for name in one.sizes)
    made = StudyWorkload if one.is_studied else PartWorkload
    named = model if one.of_model or one.of_gpt else ""
    return made(part, own, named, dtype or one.dtype, seed, routing, tuple(batches) if one.of_tasks else ())
