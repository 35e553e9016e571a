"""A small dropless layer with an uneven exchange: the kind of program whose shapes follow the routing.

Every rank sends each expert exactly the rows that chose it, after an exchange of counts that both ends read on the
host. The rows travel by a flat exchange, or by a hierarchical one that needs to know more counts.
T tokens, E experts, L local experts, K choices, D model, N rows sent, M rows received.
"""

import torch

from moebench.kernels.collectives.exchanges import plan_exchange
from moebench.kernels.collectives.start_wait import all_to_all
from moebench.kernels.expert_ffn import expert_ffn_grouped
from moebench.kernels.explicit import count
from moebench.kernels.host import read_ints
from moebench.kernels.region import region
from moebench.kernels.topk_gate import topk_gate
from moebench.systems.interface import LayerWeights, MoELayer


class RaggedLayer(MoELayer):
    """Sorted rows, uneven all-to-all, grouped experts, uneven all-to-all, weighted sum."""

    def __init__(self, workload, group, device, dtype, exchange="flat"):
        super().__init__()
        self.workload, self.group, self.exchange = workload, group, exchange
        local = workload.experts // group.size
        d_model, d_ffn = workload.d_model, workload.d_ffn
        self.gate = torch.nn.Linear(d_model, workload.experts, bias=False, device=device, dtype=dtype)
        self.w1_LDF = torch.nn.Parameter(torch.empty(local, d_model, d_ffn, device=device, dtype=dtype))
        self.w2_LFD = torch.nn.Parameter(torch.empty(local, d_ffn, d_model, device=device, dtype=dtype))
        self.w1_LDF.is_expert = self.w2_LFD.is_expert = True

    def load_weights(self, weights: LayerWeights) -> None:
        with torch.no_grad():
            self.gate.weight.copy_(weights.gate_DE.t())
            self.w1_LDF.copy_(weights.w1_LDF)
            self.w2_LFD.copy_(weights.w2_LFD)

    def forward(self, x_TD):
        experts, ranks, top_k = self.workload.experts, self.group.size, self.workload.gate.top_k
        local = experts // ranks
        with region("gate"):
            probs_TE, weights_TK, experts_TK = topk_gate(self.gate(x_TD), top_k)
            counts_E = count(experts_TK, experts)
            aux = probs_TE.mean(0).sum()
        with region("exchange"):
            received_E = all_to_all(counts_E, self.group)
            sent = read_ints(counts_E, "expert_counts")
            received = read_ints(received_E.view(ranks, local), "received_counts")
        send_splits = [sum(sent[rank * local : (rank + 1) * local]) for rank in range(ranks)]
        receive_splits = [sum(received[rank * local : (rank + 1) * local]) for rank in range(ranks)]
        with region("dispatch"):
            order_N = experts_TK.reshape(-1).sort(stable=True).indices
            rows_ND = x_TD.index_select(0, order_N // top_k)
        with region("exchange"):
            plan = plan_exchange(self.exchange, self.group, send_splits, receive_splits, device=x_TD.device)
            rows_MD = plan.start(rows_ND).wait()
        with region("experts"):
            # Rows arrive rank by rank: cut into (rank, expert) pieces and sort them by expert.
            pieces = rows_MD.split(received)
            by_expert = [pieces[rank * local + expert] for expert in range(local) for rank in range(ranks)]
            totals = [sum(received[rank * local + expert] for rank in range(ranks)) for expert in range(local)]
            out_MD = expert_ffn_grouped(torch.cat(by_expert), totals, self.w1_LDF, self.w2_LFD)
            cuts = [received[rank * local + expert] for expert in range(local) for rank in range(ranks)]
            pieces = out_MD.split(cuts)
            out_MD = torch.cat([pieces[expert * ranks + rank] for rank in range(ranks) for expert in range(local)])
        with region("exchange"):
            out_ND = plan.reversed().start(out_MD).wait()
        with region("combine"):
            weighted_ND = out_ND * weights_TK.reshape(-1).index_select(0, order_N).unsqueeze(1)
            y_TD = x_TD.new_zeros(x_TD.shape).index_add(0, order_N // top_k, weighted_ND)
        return y_TD, aux


class Ragged:
    """The module as a system, unregistered."""

    name, title, source = "ragged", "Ragged test layer", "tests"

    def __init__(self, exchange="flat"):
        self.exchange = exchange

    def supports(self, workload, conventions):
        return None

    def as_shipped(self, gate):
        raise NotImplementedError("a test layer ships nowhere")

    def build(self, workload, group, conventions, device, dtype):
        return RaggedLayer(workload, group, device, dtype, self.exchange)


RAGGED = Ragged()
