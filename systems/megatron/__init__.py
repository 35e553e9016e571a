"""Megatron-Core's MoE layer: router, token dispatchers, grouped experts, each a part of its own.

    routes.py      logits -> a map of who goes where and the weights, [T, E] each
    losses.py      the balance losses and the z-loss
    layout.py      rows into the order of experts and back: by sort as Megatron does, or by fused kernels
    dispatcher.py  what a dispatcher is
    alltoall.py    dispatcher `alltoall`: ragged without a capacity, padded with one
    allgather.py   dispatcher `allgather`
    experts.py     grouped products
    layer.py       the layer that puts them together
    system.py      the registered systems

Read in NVIDIA/Megatron-LM: megatron/core/transformer/moe of core 0.16.1 and later.
"""
