"""Synthetic measurements: the noises that machines show, without a change of the code or with one of a given size.

Samples are logarithmic: noise of 0.02 is 2 %. A run is some processes, each of `BLOCKS` blocks in which every case is
timed twice; time goes on from process to process and from run to run.
"""

from dataclasses import dataclass

import numpy as np

BLOCKS, A_BLOCK = 7, 2


@dataclass(frozen=True)
class Noise:
    """One kind of noise; every part is a share of the time.

    Attributes:
        sample: standard deviation of single samples; process, run: of offsets that a process or a run keeps.
        drift: how much slower the machine is at the end of everything than at its start, or faster: the sign is drawn.
        correlation: of neighbouring samples of a process (their standard deviation stays `sample`).
        spikes: probability that a sample takes two to ten times as long.
        bursts: probability that a block takes half as long again.
        modes: how much slower the second mode is; mode_of: what is in one mode: `sample`, `block` or `process`;
            mode_share: how often it is the second.
        first: how much longer the first block of a process takes.
    """

    name: str
    sample: float = 0.02
    process: float = 0.005
    run: float = 0.0
    drift: float = 0.0
    correlation: float = 0.0
    spikes: float = 0.0
    bursts: float = 0.0
    modes: float = 0.0
    mode_of: str = "sample"
    mode_share: float = 0.5
    first: float = 0.0

    def __str__(self) -> str:
        return self.name.partition(":")[0]


QUIET = Noise("quiet: samples 0.5 %, processes 0.2 %", sample=0.005, process=0.002)
ORDINARY = Noise("ordinary: samples 2 %, processes 0.5 %")
LOUD = Noise("loud: samples 8 %, processes 3 %", sample=0.08, process=0.03)
WITHIN_RUNS = (
    QUIET,
    ORDINARY,
    LOUD,
    Noise("drift of 5 % through both runs", drift=0.05),
    Noise("drift of 20 % through both runs", drift=0.2),
    Noise("spikes: 1 sample in 20 takes 2 to 10 times as long", spikes=0.05),
    Noise("bursts: 1 block in 5 takes half as long again", bursts=0.2),
    Noise("two modes of samples, 10 % apart", modes=0.1),
    Noise("two modes of blocks, 10 % apart", modes=0.1, mode_of="block"),
    Noise("neighbours alike: correlation 0.95, samples 3 %", sample=0.03, correlation=0.95),
    Noise("cold start: the first block takes half as long again", first=0.5),
)
BEYOND_TWO_RUNS = (
    Noise("two modes of processes, 10 % apart, half of them slow", modes=0.1, mode_of="process"),
    Noise("two modes of processes, 10 % apart, one in five slow", modes=0.1, mode_of="process", mode_share=0.2),
    Noise("runs differ by 2 %", run=0.02),
)


def runs(
    noise: Noise, random: np.random.Generator, counts: tuple[int, ...], cases: int = 1, slower: float = 0.0
) -> list[list[tuple[np.ndarray, ...]]]:
    """Samples of runs with `counts` processes, the last one slower by a share: [run][case][process].

    Cases of a run share its drift, and differ in how loud they are by up to two times.
    """
    total = sum(counts) * BLOCKS * A_BLOCK
    sign = random.choice((-1.0, 1.0))
    loudness = np.exp(random.uniform(-0.7, 0.7, cases)) if cases > 1 else np.ones(1)
    found: list[list[tuple[np.ndarray, ...]]] = []
    start = 0
    for number, processes in enumerate(counts):
        run_offsets = random.normal(0.0, noise.run, cases)
        by_case: list[list[np.ndarray]] = [[] for _ in range(cases)]
        for _ in range(processes):
            time = (start + np.arange(BLOCKS * A_BLOCK)) / total
            start += BLOCKS * A_BLOCK
            for case in range(cases):
                log_s = run_offsets[case] + sign * noise.drift * time + loudness[case] * _process(noise, random)
                if number == len(counts) - 1:
                    log_s = log_s + np.log1p(slower)
                by_case[case].append(1e-3 * np.exp(log_s))
        found.append([tuple(groups) for groups in by_case])
    return found


def _process(noise: Noise, random: np.random.Generator) -> np.ndarray:
    """Logarithms of one process's samples, [BLOCKS * A_BLOCK]."""
    count = BLOCKS * A_BLOCK
    log_s = random.normal(0.0, noise.process) + _correlated(noise, random)
    if noise.spikes:
        log_s = log_s + (random.random(count) < noise.spikes) * np.log(random.uniform(2.0, 10.0, count))
    if noise.bursts:
        log_s = log_s + np.repeat(random.random(BLOCKS) < noise.bursts, A_BLOCK) * np.log(1.5)
    if noise.modes:
        units = {"sample": count, "block": BLOCKS, "process": 1}[noise.mode_of]
        log_s = log_s + np.repeat(random.random(units) < noise.mode_share, count // units) * np.log1p(noise.modes)
    if noise.first:
        log_s[:A_BLOCK] += np.log1p(noise.first)
    return log_s


def _correlated(noise: Noise, random: np.random.Generator) -> np.ndarray:
    white = random.normal(0.0, noise.sample, BLOCKS * A_BLOCK)
    if not noise.correlation:
        return white
    fresh = np.sqrt(1.0 - noise.correlation**2)
    for index in range(1, white.size):
        white[index] = noise.correlation * white[index - 1] + fresh * white[index]
    return white


