"""The figures of `python -m benchmarks orchestrator` that do not depend on the machine."""

from dataclasses import replace

from benchmarks.orchestrator import FAILURES, GROUP_SIZE, Coin, GroupCoin, share_sent, waiting_bytes
from benchmarks.staleness import RULES, Simulated, simulate


def test_a_rollout_that_waits_takes_hardly_more_than_its_sample() -> None:
    held, sample = waiting_bytes()
    assert 180_000 < sample < 190_000
    assert 1.0 < held / sample < 1.2


def test_failures_cost_their_own_tokens_alone() -> None:
    """Dropping a group at any failure keeps a success only if the other seven succeed, too."""
    assert share_sent(Coin(seed=0, failures=FAILURES)) == 1.0
    expected = (1 - FAILURES) ** (GROUP_SIZE - 1)  # 0.698
    assert abs(share_sent(GroupCoin(seed=0, failures=FAILURES)) - expected) < 0.05


def test_groups_that_grow_too_old_sample_no_further() -> None:
    """The figures of docs/staleness.md: a simulation without a clock, the same everywhere."""
    assert simulate() == Simulated(
        num_sampled=2_142_533, num_stale=242_988, num_saved=47_897, num_ticks=73_189
    )
    patient = simulate(replace(RULES, max_off_policy_steps=8))
    assert (patient.num_stale, patient.num_saved) == (0, 0)
