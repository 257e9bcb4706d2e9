"""What the expert says of the states that a policy has visited, beside a simulator that is asked as the policy acts."""

import numpy as np
import pytest
import torch
from whole import WholeSimulator, whole_spec

from tests.storm.toy import make_toy_env, tiny_policy, toy_spec
from vla_algos import BehaviourCloning, EpisodeCollector, ExpertLabels, record_demonstrations
from vla_algos.samples import Samples
from vla_algos.state_prediction import future_states
from vla_common import keys
from vla_envs import Episode, EpisodeQueue, make_env
from vla_envs.experts import label
from vla_policies import make_policy

TASKS = "metaworld/button-press-topdown-v3+reach-v3"
OPTIONS = {"image_size": 32, "render_quality": "minimal"}
SMALL = {"family": "small", "dim": 16, "layers": 1, "heads": 2, "channels": [4, 4, 4], "keypoints": 4}
EPISODES = [Episode(task, trial, 7) for trial in range(2) for task in range(2)]


def labelled(env, policy, episodes, **settings):
    visited = list(EpisodeCollector(env, policy, episodes).iterator())
    labels = ExpertLabels(policy, **settings)
    labels.extend(env, episodes, visited)
    return labels, visited


def test_labels_are_what_the_expert_says_on_the_way():
    pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
    env = make_env(TASKS, 2, 5, num_workers=2, episodes=EpisodeQueue(), max_episode_steps=22, **OPTIONS)
    torch.manual_seed(0)
    policy = make_policy(env.simulator_spec, **SMALL)
    labels, visited = labelled(env, policy, EPISODES)
    found = labels.samples()
    twin, order = env.simulator_spec.make(), sorted(range(4), key=lambda number: EPISODES[number].task_id)
    for place, number in enumerate(order):
        episode, decisions = EPISODES[number], visited[number]
        rows = found.choose(found[keys.EPISODE] == place)
        twin.reset(episode)
        for time, chunk in enumerate(decisions[keys.ACTION].numpy()):
            seen = twin.observe()
            assert np.array_equal(rows[keys.STATES][time], seen.states)
            assert np.array_equal(rows[keys.IMAGES][time], seen.images)  # what the policy saw
            for action, wanted, given in zip(
                chunk, rows[keys.ACTION][time], decisions[keys.NEXT, keys.STEP_MASK][time], strict=True
            ):
                if given:
                    assert np.array_equal(wanted, twin.expert_action())
                    twin.step(action)
        assert torch.equal(rows[keys.STEP_MASK], decisions[keys.NEXT, keys.STEP_MASK])
        assert rows[keys.STEP].tolist() == [0, 5, 10, 15, 20][: len(rows)]
        assert np.array_equal(rows[keys.FINAL_STATES][0], twin.observe().states)
        assert {*rows[keys.TASK_ID].tolist()} == {episode.task_id}
    twin.close()
    env.close()


def test_what_a_chunk_that_is_one_motion_is_labelled_with():
    simulator, chunk = WholeSimulator(whole_spec()), np.full((2, 3, 1), 0.5, np.float32)
    executed = np.array([[True] * 3, [True] + [False] * 2])  # the second is solved by its first action
    found = label(simulator, (Episode(0, 0), chunk, executed), ignore_terminations=False)
    assert simulator.chunks == [3, 3]
    assert (found[keys.ACTION] == 0.25).all()
    assert np.array_equal(found[keys.STEP_MASK], executed)
    with pytest.raises(RuntimeError, match="toy/whole does not repeat Episode"):
        label(simulator, (Episode(0, 0), chunk, np.ones((2, 3), bool)), ignore_terminations=False)


def test_after_demonstrations_with_what_other_losses_need(tmp_path):
    spec = toy_spec({}, tmp_path)
    policy, env = tiny_policy(spec), make_toy_env(spec, 2, 2)
    shown = Samples(record_demonstrations(env, policy, [Episode(0, trial, 3) for trial in range(4)], noise=0.0))
    labels, visited = labelled(env, policy, [Episode(1, trial, 4) for trial in range(4)], demonstrations=shown)
    both, new = labels.samples(), sum(map(len, visited))
    assert len(both) == len(shown) + new
    assert both.episodes == shown.episodes + 4
    later = future_states(both, [2])  # of each episode its own
    assert torch.equal(later[len(shown) :, 0], torch.cat(visited)[keys.STATES])
    assert torch.equal(later[: len(shown)], future_states(shown, [2]))
    BehaviourCloning(policy, both, steps=2).step()
    again = ExpertLabels(policy, shown)
    again.load_state_dict(labels.state_dict())
    assert (again.samples()[torch.arange(len(both))] == both[torch.arange(len(both))]).all()
    assert again.metrics() == labels.metrics()
    env.close()


def test_what_crashes_is_left_out(tmp_path):
    faults = {3: ("raise", 0, 0), 5: ("exit", 3, 2)}  # the second comes to work in its third try
    env = make_toy_env(toy_spec(faults, tmp_path), 2, 2)
    policy = tiny_policy(env.simulator_spec)
    labels, visited = labelled(env, policy, [Episode(0, trial, 4) for trial in range(8)])
    assert [bool(each[keys.NEXT, keys.CRASHED].any()) for each in visited] == [trial == 3 for trial in range(8)]
    assert labels.samples()[keys.TRIAL_ID].unique().tolist() == [0, 1, 2, 4, 5, 6, 7]
    env.close()


def test_with_nothing_to_clone_it_says_so(tmp_path):
    env = make_toy_env(toy_spec({}, tmp_path), 2, 1)
    labels, _ = labelled(env, tiny_policy(env.simulator_spec), [Episode(0, 0, 4)], budget=1)
    with pytest.raises(RuntimeError, match=r"no episode: all crashed, or labels.budget is too small"):
        labels.samples()
    env.close()
