"""Runs that are killed at any operation on their files, or at any moment; damaged checkpoints: a part of the storms."""

import pytest

from tests.storm import corruption, kills

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("storm", "count"), [(kills.at_operations, 6), (kills.at_moments, 4), (kills.of_two, 2), (corruption.runs, 8)]
)
def test_nothing_is_lost(storm, count):
    tally = storm(count, 1)
    assert tally.clean, tally.failures
