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
    "formula_time",
)

# Parts of a whole that is compared itself: a part may grow where the whole shrinks. Shown when asked for.
PARTS_OF_A_WHOLE = (
    "region_time",
    "busy_time",
    "exposed_communication",
    "exposed_transfer",
    "host_bound",
    "port_pressure",
)


def is_exact(engine: str, metric: str) -> bool:
    """Whether a value without samples is the same at every repetition."""
    return metric in COUNTS or (engine == "sim" and metric not in DERIVED)


def is_part(metric: str, part: str) -> bool:
    """Whether a value is a part of a whole that is compared too."""
    return metric in PARTS_OF_A_WHOLE or "region=" in part
