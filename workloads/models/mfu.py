"""Model FLOPs utilisation as MegaScale-MoE counts it: its printed 32.48 % follows from its printed tokens a second.

A token costs 6 operations a parameter that it meets in a product (the output head among them, the look-up of its
embedding not) and, in every layer, 6 x query columns x positions of causal attention: scores and values, of which half
are needed, forward and twice that backward. What is computed again for the backward does not count.
"""

from moebench.workloads.models.decoder import DecoderModel


def flops_per_token(model: DecoderModel, sequence: int | None = None) -> float:
    """Of forward and backward; `sequence` is the model's own where None."""
    positions = model.sequence if sequence is None else sequence
    columns: float = model.shape.queries
    if model.latent is not None:  # scores of one width, values of another
        widths = model.latent.nope_size + model.latent.rope_size + model.latent.value_size
        columns = model.shape.heads * widths / 2
    return 6.0 * model.active_parameters + 6.0 * model.layers * columns * positions


def mfu(model: DecoderModel, tokens_per_s: float, gpus: int, peak_flops: float, sequence: int | None = None) -> float:
    """The share of the GPUs' peak that the model's operations take.

    Args:
        tokens_per_s: of the whole job; peak_flops: of one GPU.

    Raises:
        ValueError: no GPUs, a peak or a rate that is not positive.
    """
    if gpus < 1 or peak_flops <= 0 or tokens_per_s <= 0:
        raise ValueError(f"gpus = {gpus}, peak_flops = {peak_flops}, tokens_per_s = {tokens_per_s}: must be positive")
    return tokens_per_s * flops_per_token(model, sequence) / (gpus * peak_flops)
