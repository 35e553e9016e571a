"""Megatron-LM as systems that train decoders, of October 2024 and of today.

    megatron_0.10+tensor=node+expert=node+dispatcher=alltoall+recompute=none+chunks=1
    megatron_modern+tensor=node+expert=node+attention=tensor+recompute=none+chunks=1+overlap=none

`tensor`: tensor-parallel ranks t; `expert`: expert-parallel ranks, in 0.10 beside t, so that t times as many share a
layer, in modern all that share it; `node`: as many as a node has, or has left. No more tensor-parallel ranks than a
node has are taken. Micro-batches are those of a tensor-parallel group. `attention=ulysses` cuts sequences among the
expert-parallel ranks. `recompute`, `chunks`: as of `DecoderSetting`. Gradients are summed in FP32, as BF16 runs force.
`overlap`: `combined`, the forward of a micro-batch beside the backward of another (`overlap_moe_expert_parallel_comm`);
`delayed`, with products of weights' gradients after the others (`delay_wgrad_compute`); rules as `TransformerConfig` of
core 0.16.1 has them (several chunks where there are several stages, experts on several ranks, BF16, no layer recomputed
as a whole).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moebench.kernels.host import Answer, UnansweredRead
from moebench.systems.job_interface import ADAM, JobStage, Spread, StagePlace, Training, name_of
from moebench.systems.megascale import stage
from moebench.systems.megascale.reads import counts_of
from moebench.systems.megatron import decoder
from moebench.systems.megatron.combined import OVERLAPS
from moebench.systems.megatron.decoder import ATTENTION, RECOMPUTE, DecoderSetting
from moebench.systems.megatron.indexed import DISPATCHERS
from moebench.systems.megatron.trained import MegatronStage
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.job import JOB_DTYPES, JobLayout
from moebench.workloads.models.decoder import DecoderModel

NODE = "node"
_DEGREES = (NODE, "1", "2", "4", "8", "16", "32", "64")


@dataclass(frozen=True)
class Options:
    """What the name of either may say."""

    tensor: str = NODE
    expert: str = NODE
    dispatcher: str = "alltoall"
    attention: str = "tensor"
    recompute: str = "none"
    chunks: str = "1"
    overlap: str = "none"


class MegatronJob:
    """Megatron-LM of one version under some options."""

    rounding = 0.0

    def __init__(self, name: str, title: str, source: str, version: str, options: Options) -> None:
        self.name, self.title, self.source = name, title, source
        self.version, self.options = version, options

    @property
    def choices(self) -> Mapping[str, Sequence[str]]:
        """Options and their values."""
        own: dict[str, Sequence[str]] = {"tensor": _DEGREES, "expert": _DEGREES, "recompute": RECOMPUTE[self.version]}
        own["chunks"] = ("1", "2", "4", "8")
        more: dict[str, Sequence[str]] = {"dispatcher": tuple(DISPATCHERS)}
        return own | (more if self.version == "0.10" else {"attention": ATTENTION, "overlap": OVERLAPS})

    @property
    def dtypes(self) -> Sequence[str]:
        """What parameters and rows may be."""
        return JOB_DTYPES if self.options.overlap == "none" else ("bf16",)

    @property
    def apart(self) -> str:
        """The same with micro-batches one after the other."""
        return "+".join(part for part in self.name.split("+") if not part.startswith("overlap="))

    def variant(self, options: Mapping[str, str]) -> "MegatronJob":
        """With other options.

        Raises:
            InputError: unknown option or value; lists the valid ones.
        """
        for option, value in options.items():
            if option not in self.choices:
                raise one_of(f"option of system {self.name}", option, self.choices)
            if value not in self.choices[option]:
                raise one_of(f"{option} of system {self.name}", value, self.choices[option])
        chosen = replace(self.options, **options)
        if chosen.attention == "ulysses" and options.get("tensor", "1") != "1":
            raise InputError(f"tensor={options['tensor']}: attention=ulysses cuts no weights, tensor must be 1")
        name = "+".join([self.name, *(f"{key}={value}" for key, value in options.items())])
        return MegatronJob(name, self.title, self.source, self.version, chosen)

    def on_few(self, ranks: int, node_ranks: int) -> "MegatronJob":
        """With as many expert-parallel ranks as fit; degrees as numbers, so that what is the same has one name."""
        tensor, shared = self._degrees(JobLayout(ranks, node_ranks, stages=1, global_batch=1))
        width = tensor if self.version == "0.10" else 1
        few = replace(self.options, tensor=str(tensor), expert=str(min(shared, max(ranks, width)) // width))
        name = name_of(self.name.split("+")[0], few)
        return MegatronJob(name, self.title, self.source, self.version, few)

    def settings(self, model: DecoderModel, node_ranks: int) -> tuple[str, ...]:
        """Names with the options that are worth trying: tensor- and expert-parallel ranks, dispatcher, attention,
        recomputation, micro-batches beside each other where that goes, then without attention's collectives in chunks.
        """
        degrees = [int(n) for n in _DEGREES[1:]]
        most = min(model.shape.experts, max(degrees))
        is_old = self.version == "0.10"
        found: list[dict[str, str]] = []
        for tensor in (n for n in degrees if node_ranks % n == 0):
            for expert in (n for n in degrees if n <= most and (is_old or n % tensor == 0)):
                shared = {"tensor": str(tensor), "expert": str(expert)}
                found += [shared] if is_old or tensor == 1 else [shared, shared | {"chunks": "2"}]
        if is_old:
            others = [one for one in DISPATCHERS if one != self.options.dispatcher]
            found += [shared | {"dispatcher": one} for shared in found for one in others]
        else:
            found += [{"expert": str(n), "attention": "ulysses"} for n in degrees if 1 < n <= most]
        kept = [{}, *({"recompute": one} for one in RECOMPUTE[self.version] if one != self.options.recompute)]
        tried = [options | more for options in found for more in kept]
        tried += [one | {"overlap": overlap} for one in tried if self._can_overlap(one) for overlap in OVERLAPS[1:]]
        return tuple(self.variant(options).name for options in tried)

    def _can_overlap(self, options: Mapping[str, str]) -> bool:
        """Whether micro-batches may run beside each other under some options, and attention is not in chunks."""
        return self.version != "0.10" and options["expert"] != "1" and (
            options.get("recompute") != "moe" and options.get("chunks", "1") == "1"
        )

    def spread(self, layout: JobLayout) -> Spread | str:
        """How many ranks share what; or why the numbers do not go, naming keys and numbers."""
        tensor, ranks = self._degrees(layout)
        if ranks % tensor:
            return f"{self.name}: {ranks} expert-parallel ranks are not a multiple of tensor = {tensor}"
        if layout.world % (ranks * layout.stages):
            return f"world = {layout.world} is not a multiple of {ranks} ranks of a layer x stages = {layout.stages}"
        sharing = ranks if self.options.attention == "ulysses" else tensor
        replicas, groups = layout.world // (ranks * layout.stages), ranks // sharing
        together = replicas * groups * layout.micro_batch
        if layout.global_batch % together:
            parts = f"replicas = {replicas * groups} x micro_batch = {layout.micro_batch}"
            return f"global_batch = {layout.global_batch} is not a multiple of {parts}"
        return Spread(ranks, replicas, sharing, layout.global_batch // together, self.options.overlap != "none")

    def supports(self, model: DecoderModel, layout: JobLayout) -> str | None:
        """None, or why not, naming keys and numbers."""
        spread = self.spread(layout)
        if isinstance(spread, str):
            return spread
        setting = self._setting(layout)
        reason = self._overlap_problem(layout, spread.ranks)
        reason = reason or stage.problem(model) or stage.tie_problem(model, layout.stages * layout.chunks)
        if reason is None and model.vocabulary % setting.tensor_parallel:
            reason = f"vocabulary = {model.vocabulary} is not divisible by tensor = {setting.tensor_parallel}"
        batch = spread.sequences(layout.micro_batch)
        return reason or decoder.problem(model.shape, spread.ranks, model.sequence, batch, setting)

    def stage(
        self, model: DecoderModel, layout: JobLayout, place: StagePlace, training: Training = ADAM
    ) -> JobStage:
        """What this rank runs of a stage."""
        spread = self.spread(layout)
        if isinstance(spread, str):
            raise InputError(spread)
        batch = spread.sequences(layout.micro_batch)
        setting, overlap = self._setting(layout), self.options.overlap
        return MegatronStage(model, batch, spread.microbatches, place, setting, training, overlap)

    def _overlap_problem(self, layout: JobLayout, expert_ranks: int) -> str | None:
        """Why micro-batches can't overlap, as `TransformerConfig` has it."""
        told = self.options
        if told.overlap == "none":
            return None
        if layout.stages > 1 and layout.chunks == 1:
            need = f"stages = {layout.stages} need several chunks each"
            return f"overlap={told.overlap}: {need}, the layout has chunks = 1"
        if expert_ranks == 1:
            return f"overlap={told.overlap}: with one expert-parallel rank no rows travel"
        if told.recompute == "moe":
            return f"overlap={told.overlap}: the layer runs in parts, recompute=moe would run it as a whole again"
        return None

    def reads(self, model: DecoderModel, layout: JobLayout, shares: Sequence[float], index: int) -> Answer:
        """What a rank reads: rows of its experts, of tokens that every rank routes alike."""
        spread = self.spread(layout)
        assert isinstance(spread, Spread)
        tensor, ranks = self._degrees(layout)
        width = tensor if self.version == "0.10" else 1
        local = len(shares) * width // ranks
        own = slice(index // width * local, (index // width + 1) * local)
        routes = model.sequence * layout.micro_batch // spread.sharing * model.shape.top_k
        sent = counts_of(shares, routes)
        answers = {
            "expert_counts": sent,
            "received_counts": sent[own] * ranks,
            "received_kept_by_expert": [count * ranks for count in sent[own]],
        }

        def answer(quantity: str, values: Tensor) -> list[int]:
            if quantity not in answers:
                raise UnansweredRead(f"the program reads {quantity}; shares of the routes answer {', '.join(answers)}")
            return answers[quantity]

        return answer

    def _degrees(self, layout: JobLayout) -> tuple[int, int]:
        """Tensor-parallel ranks, and ranks that share a layer."""
        told, node = self.options, layout.node_ranks
        tensor = node if told.tensor == NODE else min(int(told.tensor), node)
        tensor = 1 if told.attention == "ulysses" else tensor
        if self.version == "0.10":
            return tensor, tensor * (max(node // tensor, 1) if told.expert == NODE else int(told.expert))
        return tensor, node if told.expert == NODE else int(told.expert)

    def _setting(self, layout: JobLayout) -> DecoderSetting:
        tensor, told = self._degrees(layout)[0], self.options
        return DecoderSetting(self.version, tensor, told.dispatcher, told.attention, told.recompute, int(told.chunks))


MEGATRON_0_10 = MegatronJob(
    "megatron_0.10",
    "Megatron-LM (core 0.10, October 2024)",
    "NVIDIA/Megatron-LM at f1f03922 (28 October 2024); read in core 0.9.0, the release before it",
    "0.10",
    Options(),
)
MEGATRON_MODERN = MegatronJob(
    "megatron_modern",
    "Megatron-LM (core 0.16)",
    "NVIDIA/Megatron-LM, core 0.16.1",
    "modern",
    Options(),
)
