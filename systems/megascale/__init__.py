"""MegaScale-MoE (arXiv 2505.11432): a decoder layer inside one node of n ranks, in the ways that the paper compares.

    weights.py     the layer's weights in one layout, and which part of them a rank holds
    plain.py       the definition: one rank, everything written out
    routing.py     router, device-level balance loss, rows of the experts
    attention.py   four ways to run attention: tp, sp, cp, dp
    experts.py     three ways to run the experts: tp, ep-a2a, ep-ag
    heads.py, ffn.py  what a rank computes in between
    overlapped.py  pairs of a product and a collective in chunks, with the products of chunk_products.py
    layer.py       the layer put together from them
    volumes.py     the paper's formulas of what is sent, Eqs 1 to 10, and which way for which number of choices
    macro.py       the layer as one node with its operators listed; chain.py what is kept for the backward,
                   chain_forward.py and chain_backward.py the lists, chain_chunks_*.py those in chunks,
                   chain_rows.py those of experts by all-to-all
    gradients.py   data-parallel gradients: BF16 all-to-all with FP32 sums, beside two other ways
    sharded.py     an optimiser whose state is divided among the replicas
    fp8_exchange.py  a reduce-scatter whose rows travel in FP8
    stage.py       layers of a model; ends.py embedding, head and loss at its ends
    sync.py        gradients of replicated weights, inside nodes and between them
    plan.py        layouts of a job, why some have no meaning, what a rank holds
    bucket.py      parameters whose gradients are summed together; trained.py a stage with its training step
    system.py      all of it as a system that trains decoders; reads.py what its traces read

The authors released no code; section numbers are those of the paper's third version.

S positions of a sequence, s of them on a rank, B sequences, T = s B tokens of a rank, W tokens of all ranks, D model,
H query heads, G key-value heads, Q = H x head size, F feed-forward, E experts, L of a rank, K choices, n ranks. Rows
are position by position, and in a position sequence by sequence: the ranks' rows one after another are the whole.
"""
