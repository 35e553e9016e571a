"""The logits of a router as a recorded routing, which suites impose on every system (`routing.kind = "trace"`).

A router is that of a small layer trained here with one of moebench's rules, the weights of one from a file, or anything
that can be imported and called.

T tokens, E experts, D model.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moebench.gates.learn import train
from moebench.gates.study import pupil
from moebench.imports.tensors import READABLE, read_matrix, read_tensors
from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.gate import GateTraining, GateWorkload
from moebench.workloads.gates.registry import get_gate, parse_label, problem

TOKENS = 4096
_ROUTERS = (".gate.weight", ".router.weight")  # how their names end in state dicts


@dataclass(frozen=True)
class Recorded:
    """Logits [T, E], float32, and where they are from."""

    logits_TE: Tensor
    about: str


def of_gate(label: str, experts: int, tokens: int = TOKENS, steps: int = 120, seed: int = 0) -> Recorded:
    """What the router of a small layer says of fresh tokens, after a training with a rule.

    Args:
        steps: of the training, on tokens that come in clusters (`moebench.workloads.clustered`); 0 for a fresh router.

    Raises:
        InputError: no such rule, one without a router, or one that has no meaning with so many experts.
    """
    gate = parse_label(label)
    if not get_gate(gate.name).has_router:
        raise InputError(f"gate {gate.name} has no router, so that there are no logits to record")
    reason = problem(gate, COMMON, experts)
    if reason is not None:
        raise InputError(f"gate {gate.label}: {reason}")
    own = GateTraining(max(steps, 1))
    with pupil(GateWorkload(gate, tokens, experts, seed=seed), own, gate) as (layer, task):
        if steps:
            train(layer, task, steps)
        with torch.no_grad():
            logits_TE = layer.gate(task.batch(tokens).x_TD)
    return Recorded(logits_TE.to(torch.float32), f"router of gate {gate.label} after {steps} steps, seed {seed}")


def of_router(
    router: str,
    tokens: int | None = None,
    hidden: Path | None = None,
    seed: int = 0,
    key: str | None = None,
    hidden_key: str | None = None,
    d_model: int | None = None,
) -> Recorded:
    """What a router says of tokens.

    Args:
        router: a file with its weight [E, D], or `module:object` that can be called with tokens [T, D] and gives logits
            [T, E] (or a tuple that begins with them), or that gives logits without being given anything.
        tokens: how many; default all of `hidden`, else `TOKENS`.
        hidden: file with the tokens' hidden states [N, D]; default seeded normal values.
        key, hidden_key: names of weight and hidden states in their files, where there are several.
        d_model: D, where neither a weight nor hidden states say it.

    Raises:
        InputError: what can't be read, imported or called, or doesn't fit together.
    """
    x_ND = None if hidden is None else read_matrix(hidden, hidden_key, "--hidden-key")
    if x_ND is not None and tokens is not None and tokens > len(x_ND):
        raise InputError(f"{hidden}: holds {len(x_ND)} tokens, --tokens asks for {tokens}")
    if Path(router).suffix in READABLE:
        name, weight_ED, bias_E = _weights(Path(router), key)
        d_model, ask = weight_ED.shape[1], _linear(weight_ED, bias_E)
        name = f"{name} of {Path(router).name}"
    else:
        name, ask = router, _imported(router)
    takes = _takes_tokens(ask)
    count = tokens if tokens is not None else len(x_ND) if x_ND is not None else TOKENS
    x_TD = x_ND[:count] if x_ND is not None else _normal(count, d_model, seed) if takes else None
    if x_TD is not None and d_model is not None and x_TD.shape[1] != d_model:
        raise InputError(f"{hidden}: hidden states are {x_TD.shape[1]} wide, the router takes {d_model}")
    logits_TE = _asked(name, ask, x_TD if takes else None)
    if takes and len(logits_TE) != count:
        raise InputError(f"{name}: gives logits {tuple(logits_TE.shape)} for {count} tokens; it must give [T, E]")
    logits_TE = logits_TE[:tokens]
    if tokens is not None and len(logits_TE) < tokens:
        raise InputError(f"{name}: gives logits of {len(logits_TE)} tokens, --tokens asks for {tokens}")
    of_whom = "its own tokens" if not takes else f"tokens of {hidden.name}" if hidden else f"normal tokens, seed {seed}"
    return Recorded(logits_TE, f"router {name} on {of_whom}")


def write(recorded: Recorded, path: Path) -> None:
    """Write a recorded routing; the same bytes for the same logits."""
    with path.open("wb") as file:
        np.savez_compressed(file, logits=recorded.logits_TE.numpy(), about=np.array(recorded.about))


def _weights(path: Path, key: str | None) -> tuple[str, Tensor, Tensor | None]:
    """Name, weight [E, D] and bias of a router in a file."""
    tensors = read_tensors(path)
    matrices = [name for name, shape in tensors.shapes.items() if len(shape) == 2]
    routers = [name for name in matrices if f".{name}".endswith(_ROUTERS)]
    name = tensors.pick(routers or matrices, key, "--key")
    weight_ED = tensors.load(name).to(torch.float32)
    bias = f"{name.removesuffix('weight')}bias"
    if not name.endswith("weight") or bias not in tensors.shapes:
        return name or "the weight", weight_ED, None
    if tensors.shapes[bias] != weight_ED.shape[:1]:
        raise InputError(f"{path}: {bias} has shape {tensors.shapes[bias]}, {name} {tuple(weight_ED.shape)}")
    return name, weight_ED, tensors.load(bias).to(torch.float32)


def _linear(weight_ED: Tensor, bias_E: Tensor | None) -> Callable[[Tensor], Tensor]:
    def ask(x_TD: Tensor) -> Tensor:
        return torch.nn.functional.linear(x_TD, weight_ED, bias_E)

    return ask


def _imported(router: str) -> Callable[..., Any]:
    """What `module:object` names, a module in evaluation."""
    module, colon, name = router.partition(":")
    if not (colon and module and name):
        raise InputError(f"--router {router}: write a file ({', '.join(READABLE)}), or module:object")
    with _here_on_path():
        try:
            found: Any = import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (Exception, SystemExit) as error:
            raise InputError(f"--router {router}: can't be imported: {type(error).__name__}: {error}") from error
    if isinstance(found, type) or not callable(found):
        what = "a class" if isinstance(found, type) else "nothing that can be called"
        raise InputError(f"--router {router}: is {what}; name an instance or a function")
    return found.eval() if isinstance(found, torch.nn.Module) else found


@contextmanager
def _here_on_path() -> Iterator[None]:
    """Modules of the working folder can be imported."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.pop(0)


def _takes_tokens(ask: Callable[..., Any]) -> bool:
    """Whether it wants to be given something."""
    target = ask.forward if isinstance(ask, torch.nn.Module) else ask
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return True
    by_name_only = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return any(p.kind not in by_name_only and p.default is p.empty for p in parameters)


def _normal(tokens: int, d_model: int | None, seed: int) -> Tensor:
    if d_model is None:
        raise InputError("how wide are the router's tokens? say it with --d-model, or give --hidden")
    return torch.randn(tokens, d_model, generator=torch.Generator().manual_seed(seed))


def _asked(name: str, ask: Callable[..., Any], x_TD: Tensor | None) -> Tensor:
    """The logits [T, E], float32."""
    try:
        with torch.no_grad():
            found = ask() if x_TD is None else ask(x_TD)
    except (Exception, SystemExit) as error:
        raise InputError(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    found = found[0] if isinstance(found, tuple | list) and found else found
    found = torch.from_numpy(found) if isinstance(found, np.ndarray) else found
    if not isinstance(found, Tensor) or found.dim() != 2 or not found.shape[1] or not found.dtype.is_floating_point:
        what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise InputError(f"{name}: gives {what}; it must give logits [T, E] of floating-point numbers")
    if not torch.isfinite(found).all():
        raise InputError(f"{name}: its logits are not all finite")
    return found.detach().to("cpu", torch.float32)
