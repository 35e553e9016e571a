"""Small models and their data for the tests of the passes."""

import torch

from moebench.systems.lancet.nodes import collective_of
from moebench.systems.lancet.schedule import Times
from moebench.workloads.layer import GateSpec
from moebench.workloads.models.gpt2_moe import GPT2MoE
from moebench.workloads.models.shape import GPT2MoEShape

SMALL = GPT2MoEShape(3, 16, 2, 32, 4, batch_size=2, sequence=12, vocabulary=40, positions=16)
GATES = (GateSpec("switch"), GateSpec("bpr", 1), GateSpec("topk", 2))


def data_of(shape, rank=0, device="cpu"):
    """Token ids of a rank and the ids that follow them."""
    if device == "meta":
        ids = torch.empty(shape.batch_size, shape.sequence + 1, dtype=torch.int64, device="meta")
    else:
        generator = torch.Generator().manual_seed(100 + rank)
        ids = torch.randint(shape.vocabulary, (shape.batch_size, shape.sequence + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def model_of(shape, group, device="cpu"):
    """The model, with routers that send tokens unevenly, so that some are dropped."""
    model = GPT2MoE(shape, group, device)
    if device != "meta":
        with torch.no_grad():
            for block in model.blocks[:: shape.moe_every]:
                block.ffn.router_ED.mul_(20)
    return model


def inputs_of(model, data, share=1.0):
    """What the graph of a step takes: parameters, data, the gradient of the loss."""
    parameter = next(model.parameters())
    return [*(p.detach() for p in model.parameters()), *data, torch.full((), share, device=parameter.device)]


def made_up_times():
    """Seconds by bytes: collectives slow enough for several products to fit under one."""

    def node_s(node):
        values = node.meta["val"]
        values = values if isinstance(values, (tuple, list)) else (values,)
        nbytes = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        return 1e-5 + nbytes * (1e-7 if collective_of(node) else 2e-8)

    return Times(node_s, lambda nbytes: 1e-5 + nbytes * 1e-7, lambda nbytes: nbytes * 1e-9)
