"""The replay's specification: the longest path through the graph of what waits for what, one number at a time.

Written without the product's clocks: nodes are moments (host done, device done, collective done), found recursively.
"""

from functools import lru_cache

from moebench.program import COMPUTE
from moebench.sim.cost import Machine, op_costs
from moebench.sim.network import collective_time_s


def longest_path_s(programs, topology, values):
    """Nominal step time of programs whose collectives are all on one group of all of them."""
    cpu = topology.hardware.kind == "cpu"
    costs = [op_costs(p.ops, Machine(topology.hardware, values)) for p in programs]
    starts = [[i for i, op in enumerate(p.ops) if op.collective] for p in programs]

    @lru_cache(None)
    def host(p, i):
        if i < 0:
            return 0.0
        before = host(p, i - 1)
        if cpu:
            before = max(before, device(p, i - 1))
        op = programs[p].ops[i]
        if op.kind == "host-read":
            before = max([before, device(p, i - 1)] + [done(starts[p].index(w)) for w in op.waits_on])
        return before + costs[p].issue_s[i, 0]

    @lru_cache(None)
    def device(p, i):
        if i < 0:
            return 0.0
        op = programs[p].ops[i]
        free = max([device(p, i - 1)] + [done(starts[p].index(w)) for w in op.waits_on])
        if op.stream != COMPUTE or not costs[p].device_s[i, 0]:
            return free
        return max(free, host(p, i)) + costs[p].device_s[i, 0]

    @lru_cache(None)
    def done(number):
        ready = [max(host(p, s[number]), device(p, s[number])) for p, s in enumerate(starts)]
        ready.append(done(number - 1) if number else 0.0)
        return max(ready) + duration(number)

    def duration(number):
        one = programs[0].ops[starts[0][number]].collective
        return float(collective_time_s(one, topology, values, rows(number))[0])

    def rows(number):
        found = [(p.stands_for, p.ops[s[number]].collective) for p, s in zip(programs, starts)]
        if all(c.bytes_per_peer is not None and c.bytes_per_peer == found[0][1].bytes_per_peer for _, c in found):
            return None
        return [(ranks, c.send_bytes or (c.bytes_per_peer,) * len(c.ranks)) for ranks, c in found]

    last = [len(p.ops) - 1 for p in programs]
    ends = [max(host(p, i), device(p, i)) for p, i in enumerate(last)]
    step = max(ends + ([done(len(starts[0]) - 1)] if starts[0] else []))
    serial = sum(float(c.issue_s[:, 0].sum() + c.device_s[:, 0].sum()) for c in costs)
    return step, serial + sum(duration(k) for k in range(len(starts[0])))
