"""Demonstrations of initial states that look different: ``demonstrations.spread``."""

from dataclasses import replace

import numpy as np
import pytest
from walker import Walker, walker_spec

from vla_algos.demonstrations.record import _farthest_apart
from vla_envs import Episode, EpisodeSampler, VLAEnv

EPISODES = [Episode(0, trial, 5) for trial in range(16)]


def chosen(count, episodes=EPISODES, workers=2, entry_point="walker:Walker"):
    spec = replace(walker_spec(), entry_point=entry_point)
    env = VLAEnv(spec, 2, 3, EpisodeSampler(spec, 0), num_workers=workers)
    try:
        return _farthest_apart(env, episodes, count)
    finally:
        env.close()


def starts(episodes):
    simulator = Walker(walker_spec())
    begun = []
    for episode in episodes:
        simulator.reset(episode)
        begun.append(simulator.start)
    return begun


def test_the_middle_and_both_ends_are_taken_whatever_the_number_of_workers():
    taken, every = chosen(3), starts(EPISODES)
    assert taken == chosen(3, workers=1) == sorted(taken, key=lambda episode: episode.trial_id)
    low, middle, high = sorted(starts(taken))
    assert (low, high) == (min(every), max(every))
    assert abs(middle - np.median(every)) < 0.15


def test_all_are_taken_where_there_are_no_others():
    assert chosen(16) == EPISODES


def test_of_equal_images_each_is_taken_once():
    episodes = [Episode(0, 3, 5), Episode(0, 3, 5), EPISODES[4]]
    assert chosen(2, episodes) == [episodes[0], EPISODES[4]]


@pytest.mark.parametrize("count", [3, 15])
def test_one_that_cannot_begin_is_left_out(count, capsys):
    taken = chosen(count, entry_point="walker:Refusing")
    assert [episode.trial_id for episode in taken if episode.trial_id < 2] == []
    assert len(taken) == min(count, 14)
    assert "no such scene" in capsys.readouterr().out
