"""Switch: one expert a token, weighted by its probability (Fedus et al. 2021, section 2.1)."""

from moebench.workloads.gates import topk
from moebench.workloads.gates.gate import Gate

# The rule is `topk` with K = 1. Normalising a single weight makes it 1 and the router's gradient 0, as in FastMoE's
# naive gate.
SWITCH = Gate(
    name="switch",
    title="Switch",
    formula="argmax p",
    default_top_k=1,
    choose=topk.choose,
    source="Fedus et al. 2021 (arXiv 2101.03961), section 2.1",
    aux="E sum P_e f_e",
)
