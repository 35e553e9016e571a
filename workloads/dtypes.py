"""The short names of dtypes (`fp32`) and torch's own. Apart, because the plain data files do without torch."""

import torch

from moebench.workloads.errors import one_of

TORCH_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a short name.

    Raises:
        InputError: unknown name; lists the valid ones.
    """
    if name not in TORCH_DTYPES:
        raise one_of("dtype", name, TORCH_DTYPES)
    return TORCH_DTYPES[name]
