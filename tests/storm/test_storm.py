"""The storms, whole: ``make test-storm``, ``make test-storm ARGS="-k kills"``; ``STORM_SEED=1`` draws other faults."""

import os

import pytest

from tests.storm import configurations, corruption, episodes, kills, workers

STORMS = {
    "kills at operations": (kills.at_operations, 120),
    "kills at moments": (kills.at_moments, 60),
    "damaged runs": (corruption.runs, 80),
    "damaged policies": (corruption.policies, 200),
    "published checkpoints": (corruption.foreign, 150),
    "initial states": (corruption.initial_states, 7),
    "configurations": (configurations.run, 2 * len(configurations.MISTAKES)),
    "kills of one of two": (kills.of_two, 30),
    "workers": (workers.run, 500),
    "episodes": (episodes.run, 60),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", STORMS)
def test_storm(name):
    storm, count = STORMS[name]
    tally = storm(count, int(os.environ.get("STORM_SEED", "0")))
    print(f"{name}: {tally.tried} tried, {len(tally.failures)} failed; {dict(tally.kinds)}")
    assert tally.clean, "\n".join(tally.failures)
