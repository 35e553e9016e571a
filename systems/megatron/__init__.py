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

and its decoder layer, of October 2024 and of today, with tensor and sequence parallelism:

    decoder.py     the layer; held.py which part of the weights a rank has, mesh.py which ranks share what
    attention.py   self-attention on a rank's heads; linears.py the products around it
    decoder_router.py, decoder_experts.py  what a rank computes
    indexed.py     the two dispatchers of October 2024; uneven.py collectives of ranks with differently many rows
    folded.py      the dispatcher of today, with experts over all ranks
    combined.py    the forward of a micro-batch beside the backward of another
    trained.py     a stage with gradient sums and the distributed optimiser; job.py the two versions as systems for jobs
    vocabulary.py  embedding, head and loss, cut by the vocabulary

Read in NVIDIA/Megatron-LM: megatron/core of 0.16.1 and later; for the decoder of October 2024, of 0.9.0 too.
"""
