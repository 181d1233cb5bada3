"""A run on three hosts without a shared disk; `make test-network` strikes for longer."""

import pytest

from lossy_network import Weather, why_not
from three_hosts import Planned, rough_ride, table

FAULTS = [
    Planned("cut, delivered late", ("trainer", "inference"), 1.5, holds=True),
    Planned("cut, host killed", ("trainer", "orchestrator"), 1.0, "inference"),
    Planned("host hangs", ("trainer", "inference"), 1.5, "trainer"),
]


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_run_on_three_hosts_survives_cuts_kills_and_hangs(tmp_path) -> None:
    weather = Weather(delay_s=0.02, loss=0.05)
    report = rough_ride(tmp_path, faults=lambda _: iter(FAULTS), weather=weather, seed=0, say=print)
    assert [fault["kind"] for fault in report["faults"]] == [planned.kind for planned in FAULTS]
    assert report["packets"]["lost"] > 0 and report["packets"]["late"] > 0 and report["packets"]["cut"] > 0
    assert report["versions_verified"] > 0
    assert len(table(report).splitlines()) == 2 + len(FAULTS)
