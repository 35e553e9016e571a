import numpy as np
import pytest

from benchmarks.nccl_tables import AIM, SYSTEMS, fitted, held_out, predicted, problem


def test_two_protocols_are_found_again():
    """From times that two lines make, the fit gives their minimum, and the network model the same times."""
    lines = np.array([(10e-6, 1e-9), (30e-6, 1e-11)])
    sizes = 512.0 * 2 ** np.arange(21)
    seconds = np.min(lines[:, :1] + lines[:, 1:] * sizes, axis=0)
    found = predicted(fitted(sizes, seconds, 2), sizes, 8)
    assert found == pytest.approx(seconds, rel=0.01)


@pytest.mark.slow
@pytest.mark.skipif(problem() is not None, reason=f"NVIDIA's tables can't be read: {problem()}")
def test_the_link_model_predicts_nvidias_tables():
    """Held-out sizes of in-node all-to-alls on five systems: mean error within the aim, and two protocols beat one."""
    found = held_out()
    assert {r.system for r in found} == set(SYSTEMS)
    assert np.mean([r.mean for r in found]) <= AIM
    assert all(r.mean < r.one_line for r in found)
