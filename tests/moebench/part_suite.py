"""A small suite of parts for tests, on the described machine of a paper's figures."""

TEXT = """
schema_version = 1
title = "Parts"
paper = "none"
reported = "megascale"
samples = 3

[[experiments]]
kind = "part"
name = "dispatch-mode"
title = "Dispatch"
question = "Which is shorter?"
metric = "part_time"
sizes = ["1x8"]
node_types = ["h800"]
parts = [
    { part = "dispatch", systems = ["all-to-all", "all-gather", "reduce-scatter"], sizes = { top_k = [1, 2, 8] } },
]
readings = [
    { name = "16,384 tokens", sizes = { d_model = 4096, tokens = 16384 } },
    { name = "8,192 tokens", sizes = { d_model = 4096, tokens = 8192 } },
]
figure = { kind = "part-time" }

[[experiments]]
kind = "part"
name = "intra-operator-overlap"
title = "Overlap"
question = "What hides?"
metric = "part_time"
sizes = ["1x8"]
node_types = ["h800"]
parts = [
    { part = "qkv+a2a", systems = ["serial", "fused"], models = ["mixtral-8x7b", "deepseek-moe"] },
    { part = "ag+scatter+groupedgemm", systems = ["serial", "fused"], models = ["mixtral-8x7b"] },
]
readings = [
    { name = "both", sizes = { tokens = 8192, products = 2 } },
    { name = "one", sizes = { tokens = 8192, products = 1 } },
]
figure = { kind = "part-speedup", baseline = "serial" }

[[experiments]]
kind = "part"
name = "gradient-compression"
title = "Gradients"
question = "What does it spare?"
metric = "part_time"
sizes = ["4x8", "8x8"]
node_types = ["h800"]
parts = [
    { part = "gradient-sum", systems = ["fp32-reduce-scatter", "bf16-all-to-all"], sizes = { parameters = [1000000] } },
    { part = "training", systems = ["fp32-reduce-scatter", "bf16-all-to-all"], sizes = { steps = [3] } },
]
"""


def written(folder, text=TEXT):
    """The path of the suite in a folder."""
    path = folder / "parts.toml"
    path.write_text(text)
    return str(path)
