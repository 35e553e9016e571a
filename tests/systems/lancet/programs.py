"""Random programs: chains of all-to-alls with work on the side, as backward passes are."""

import random

from moebench.systems.lancet.instructions import COMPUTE, Instruction


def backward(seed, layers=6, spread=0.5, reduces=True):
    """Per layer an all-to-all in the chain, gradients of activations, weight gradients of them, and their sums."""
    source = random.Random(seed)
    program, chain = [Instruction("input", COMPUTE, 0.0)], 0

    def add(name, kind, time_s, *needs):
        program.append(Instruction(f"{name}{len(program)}", kind, round(time_s, 6), needs, int(1e6 * time_s)))
        return len(program) - 1

    for _ in range(layers):
        chain = add("dx", COMPUTE, source.uniform(0.5, 1.5) * 1e-3, chain)
        for _ in range(source.randint(0, 3)):
            view = add("view", COMPUTE, 0.0, chain)
            dw = add("dw", COMPUTE, source.uniform(1 - spread, 1 + spread) * 1e-3, view)
            if source.random() < 0.3:
                dw = add("more", COMPUTE, source.uniform(0.1, 0.5) * 1e-3, dw)
            if reduces:
                add("reduce", "all_reduce", source.uniform(0.2, 0.6) * 1e-3, dw)
        chain = add("exchange", "all_to_all", source.uniform(0.5, 3.0) * 1e-3, chain)
    add("last", COMPUTE, 1e-3, chain)
    return program
