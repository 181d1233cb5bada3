"""`python -m benchmarks experts`."""

import pytest

from benchmarks import experts


@pytest.fixture(scope="module")
def results():
    return {result.name: result for result in experts.run()}


@pytest.mark.parametrize("disturbance", ["router noise 0.01", "router noise 0.1", "engine in bfloat16"])
def test_replay_brings_mismatch_kl_down_ten_times(results, disturbance) -> None:
    result = results[f"mismatch KL, {disturbance}"]
    assert result.baseline > 1e-3
    assert result.ours < result.baseline / 10
