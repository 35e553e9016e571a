"""One training step of a whole model as a workload: which model, gate, batch and precision. Plain data, no torch.

A model is named `gpt2-s-moe`, `gpt2-l-moe` (Lancet, arXiv 2404.19429), `gpt-4096-moe`, `gpt-58b-moe` (MoESys, arXiv
2205.10034), or is of any size: `gpt2-moe` with options, as
`gpt2-moe+layers=4+d_model=128+heads=4+sequence=64+vocabulary=512`, and as
`+experts_of_rank=1+optimizer=adamw+recompute=1+clip_norm=1`. All may have `+attention=fused`: one operator in place of
the paper's plain ones, which keep all scores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from moebench.workloads.errors import InputError, one_of
from moebench.workloads.layer import GateSpec
from moebench.workloads.models.shape import (
    ATTENTIONS,
    OPTIMIZERS,
    GPT2MoEShape,
    gpt2_l_moe,
    gpt2_s_moe,
    gpt_58b_moe,
    gpt_4096_moe,
)

ANY_SIZE = "gpt2-moe"
NAMED = {"gpt2-s-moe": gpt2_s_moe, "gpt2-l-moe": gpt2_l_moe, "gpt-4096-moe": gpt_4096_moe,
         "gpt-58b-moe": gpt_58b_moe}
MODELS = (*NAMED, ANY_SIZE)
ATTENTION = "attention"  # an option of all
SIZES = ("layers", "d_model", "heads", "d_ffn", "dense_ffn", "sequence", "moe_every", "vocabulary", "positions")
TRAINING = ("experts_of_rank", "optimizer", "recompute", "clip_norm")
# fp32 whose products run on matrix units that keep 10 bits of the factors, as torch 1.10 did by default on A100.
TF32 = "tf32"
HALVES = ("bf16", "fp16")
MODEL_DTYPES = ("fp32", TF32, *HALVES)
EXPERTS_OF_A_RANK = 2
_WORDS = {ATTENTION: ATTENTIONS, "optimizer": OPTIMIZERS}


def shape_of(model: str, gate: GateSpec, batch_size: int, ranks: int) -> GPT2MoEShape:
    """The shape of a model by name on so many ranks; of one of any size, two experts on each unless it says otherwise.

    Raises:
        InputError: unknown model or option, or a value that an option can't have.
    """
    stem, *pairs = model.split("+")
    if stem not in MODELS:
        raise one_of("model", stem, MODELS)
    options = _options(model, pairs, (ATTENTION,) if stem in NAMED else (*SIZES, *TRAINING, ATTENTION))
    attention = options.pop(ATTENTION, ATTENTIONS[0])
    if stem in NAMED:
        return replace(NAMED[stem](ranks, batch_size, gate), attention=attention)
    sizes: dict[str, Any] = {"layers": 4, "d_model": 128, "heads": 4, "sequence": 64, "vocabulary": 512, **options}
    sizes = {"d_ffn": 4 * sizes["d_model"], "positions": sizes["sequence"], **sizes}
    experts = sizes.pop("experts_of_rank", EXPERTS_OF_A_RANK) * ranks
    sizes["recompute"] = bool(sizes.get("recompute", 0))
    return GPT2MoEShape(experts=experts, batch_size=batch_size, gate=gate, attention=attention, **sizes)


def _options(model: str, pairs: Sequence[str], allowed: Sequence[str]) -> dict[str, Any]:
    """The options that stand behind a model's name."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in allowed:
            raise one_of(f"option of {model.partition('+')[0]}", name, allowed)
        if name in _WORDS:
            if text not in _WORDS[name]:
                raise one_of(f"{name} of {model!r}", text, _WORDS[name])
            found[name] = text
        elif text.isdecimal():
            found[name] = int(text)
        else:
            raise InputError(f"model {model!r}: {name}={text} is not a whole number")
    return found


@dataclass(frozen=True, slots=True)
class ModelWorkload:
    """One training step of one rank of a data-parallel model with expert-parallel layers.

    Attributes:
        model: its name.
        shape: what the name means on the ranks of the case.
        dtype: `fp32`, `tf32`: fp32 whose products are TF32, or `bf16` or `fp16`, with Adam and its masters in FP32.
        seed: of weights and tokens, where there are any.
    """

    model: str
    shape: GPT2MoEShape
    dtype: str = "fp32"
    seed: int = 0

    kind: ClassVar[str] = "model"
    metric: ClassVar[str] = "step_time"
    unit_of_work: ClassVar[str] = "step"
    issued_ahead: ClassVar[bool] = False

    @property
    def labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`gpt2-s-moe`, `switch`, `b48` before the topology; the dtype after it, where it is not fp32."""
        unusual = () if self.dtype == "fp32" else (self.dtype,)
        return (self.model, self.shape.gate.label, f"b{self.shape.batch_size}"), unusual

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns of result rows that models fill."""
        return {
            "model": self.model,
            "gate": self.shape.gate.label,
            "batch_size": self.shape.batch_size,
            "experts": self.shape.experts,
        }

    def problem(self, ranks: int) -> str | None:
        """Why it has no meaning on `ranks` ranks, naming the keys; None when it has one."""
        if self.dtype not in MODEL_DTYPES:
            return f"dtype = {self.dtype!r}: choose one of {', '.join(MODEL_DTYPES)}"
        if self.dtype in HALVES and self.shape.optimizer != "adamw":
            return f"dtype = {self.dtype!r}: needs optimizer = 'adamw', whose masters are FP32"
        return self.shape.problem(ranks)
