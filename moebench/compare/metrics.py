"""Which metrics are exact, which are timed, which say the same again: the table that every comparison goes by."""

# The same at every repetition, whatever clock the engine has.
COUNTS = (
    "flops",
    "device_bytes",
    "launches",
    "host_syncs",
    "collectives",
    "peak_memory",
    "transfer_bytes",
    "link_bytes",
    "messages",
    "port_pressure",
)

# Counts that the network model makes from what was traced, and therefore change with the described machine.
MODELLED = ("link_bytes", "messages", "port_pressure")

# What follows from a time and the workload; comparing it would count one change twice.
DERIVED = (
    *("floor_bytes", "floor_flops", "floor_time", "floor_ratio", "achieved_bandwidth", "achieved_rate"),
    *("formula_time", "algorithmic_bandwidth", "throughput", "throughput_per_gpu", "mfu", "bubble", "bubble_uneven"),
    *("alltoall_share_of_step", "alltoall_over_expert_time", "prediction_error"),
)

# What a system or a search decided, of which more is neither better nor worse, and how long it took to decide here.
DECIDED = ("best_partition_count", "predicted_step_time", "optimisation_time", "settings", "setting_time")
NOT_COMPARED = frozenset((*DERIVED, *DECIDED))

# All others are costs.
MORE_IS_BETTER = ("kept_share", "hit_rate", "hit_rate_by_size", "supported")

# Parts of a whole that is compared itself: a part may grow where the whole shrinks. Shown when asked for.
PARTS_OF_A_WHOLE = (
    *("region_time", "busy_time", "exposed_communication", "exposed_transfer", "host_bound", "port_pressure"),
    *("bubble_time", "attention_and_gemm", "exposed_comm", "other", "transfer_time", "alltoall_time", "rank_time"),
    *("iteration_time_slower_products", "memory_activations", "memory_model_states", "memory_other"),
    *("lasting_memory", "tier_memory"),
)


def is_exact(engine: str, metric: str) -> bool:
    """Whether a value without samples is the same at every repetition."""
    return metric in COUNTS or (engine == "sim" and metric not in NOT_COMPARED)


def is_part(metric: str, part: str) -> bool:
    """Whether a value is a part of a whole that is compared too."""
    return metric in PARTS_OF_A_WHOLE or "region=" in part


def is_worse(metric: str, before: float, after: float) -> bool:
    """Whether a change is for the worse."""
    return after < before if metric in MORE_IS_BETTER else after > before
