"""Files of experts and small models for the tests of this folder."""

import torch

from moebench.systems.moesys.decoder import write_random_model
from moebench.systems.moesys.expert_file import ExpertLayout, write_expert_file
from moebench.workloads.models.decoder import DecoderModel, DecoderShape

LAYOUT = ExpertLayout(5, 3, 24, 8)  # an expert of 2,304 bytes in a block of 4,096
SHAPE = DecoderShape(16, 4, 2, 4, 24, 6, 2, shared_ffn=8, qk_norm=True)
MODEL = DecoderModel("small", "Small", 5, SHAPE, 37)


def numbered_layers(layout):
    """Weights that say whose they are: 100 x layer + expert."""
    for layer in range(layout.layers):
        ids = 100.0 * layer + torch.arange(layout.experts)
        shapes = ((layout.d_model, layout.d_ffn), (layout.d_model, layout.d_ffn), (layout.d_ffn, layout.d_model))
        yield tuple(ids.view(-1, 1, 1).expand(-1, *shape).to(layout.torch_dtype) for shape in shapes)


def numbered_file(path, layout=LAYOUT):
    """A file of them."""
    write_expert_file(path, layout, numbered_layers(layout))
    return path


def model_file(folder, model=MODEL, dtype="float64"):
    """Dense weights, and the file of the experts."""
    path = folder / "experts.bin"
    return write_random_model(path, model, dtype, seed=3), path
