"""What the expert does where a policy has led, beside a simulator that is taken there by hand."""

import numpy as np
import pytest
import torch
from whole import WholeSimulator, whole_spec

from tests.storm.toy import make_toy_env, tiny_policy, toy_spec
from vla_algos import BehaviourCloning, EpisodeCollector, Interventions, record_demonstrations
from vla_algos.samples import Samples
from vla_algos.state_prediction import future_states
from vla_common import keys
from vla_envs import Episode, EpisodeQueue, make_env
from vla_envs.experts import demonstrate
from vla_policies import make_policy

TASKS = "metaworld/button-press-topdown-v3+reach-v3"
OPTIONS = {"image_size": 32, "render_quality": "minimal"}
SMALL = {"family": "small", "dim": 16, "layers": 1, "heads": 2, "channels": [4, 4, 4], "keypoints": 4}
UNDISTURBED = {"noise": 0.0, "stride": 1}


def collected(env, policy, episodes):
    return list(EpisodeCollector(env, policy, episodes).iterator())


def test_the_expert_begins_in_the_states_that_the_policy_has_visited():
    pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
    episodes = [Episode(task, trial, 7) for trial in range(2) for task in range(2)]
    env = make_env(TASKS, 2, 5, num_workers=2, episodes=EpisodeQueue(), max_episode_steps=60, **OPTIONS)
    torch.manual_seed(0)
    policy = make_policy(env.simulator_spec, **SMALL)
    visited = collected(env, policy, episodes)
    taken_over = Interventions(policy, **UNDISTURBED)
    taken_over.extend(env, episodes, visited)
    rows, twin = taken_over.samples(), env.simulator_spec.make()
    assert rows.episodes == 4
    began = []
    for number in range(4):
        own = rows.choose(rows[keys.EPISODE] == number)
        which = [Episode(int(own[keys.TASK_ID][0]), int(own[keys.TRIAL_ID][0]), 7) == each for each in episodes].index(
            True
        )
        (time,) = (visited[which][keys.STATES] == own[keys.STATES][0]).all(1).nonzero().flatten().tolist()
        began.append(time)
        twin.reset(episodes[which])
        for action in visited[which][keys.ACTION][:time].flatten(0, 1).numpy():
            twin.step(action)
        for images, states, wanted, mask in zip(
            *(own[key] for key in (keys.IMAGES, keys.STATES, keys.ACTION, keys.STEP_MASK)), strict=True
        ):
            seen, asked = twin.observe(), twin.expert_action()
            assert np.array_equal(images, seen.images)
            assert np.array_equal(states, seen.states)
            assert np.array_equal(wanted[0], asked)
            assert mask[0]
            twin.step(asked)
    assert len({*began}) > 1  # drawn for each
    assert taken_over.metrics() == {"interventions/decisions": len(rows), "interventions/actions": len(rows)}
    twin.close()
    env.close()


def test_after_a_chunk_that_is_one_motion():
    simulator = WholeSimulator(whole_spec())
    settings = {"chunk_size": 3, "stride": 1, "noise": 0.0, "max_steps": 50}
    found = demonstrate(simulator, Episode(0, 0), [np.full((3, 1), 0.2, np.float32)], **settings)
    assert found[keys.STATES][:, 0].tolist() == pytest.approx([1.8])  # one more chunk of the expert's solves it
    assert (found[keys.ACTION] == 0.25).all()
    assert found[keys.STEP].tolist() == [0]
    late = [np.zeros((3, 1), np.float32)] * 3
    assert demonstrate(simulator, Episode(0, 0), late, **settings) is None  # two actions are left


def test_after_demonstrations_with_what_other_losses_need(tmp_path):
    spec = toy_spec({}, tmp_path)
    policy, env = tiny_policy(spec), make_toy_env(spec, 2, 2)
    shown = Samples(record_demonstrations(env, policy, [Episode(0, trial, 3) for trial in range(4)], noise=0.0))
    episodes = [Episode(1, trial, 4) for trial in range(4)]
    taken_over = Interventions(policy, shown, **UNDISTURBED)
    for _ in range(2):
        taken_over.extend(env, episodes, collected(env, policy, episodes))
    both = taken_over.samples()
    assert both.episodes == shown.episodes + 8
    assert torch.equal(future_states(both, [2])[: len(shown)], future_states(shown, [2]))
    assert (both[torch.arange(len(shown))].exclude(keys.EPISODE) == shown.data.exclude(keys.EPISODE)).all()
    BehaviourCloning(policy, both, steps=2).step()
    again = Interventions(policy, shown)
    again.load_state_dict(taken_over.state_dict())
    assert (again.samples()[torch.arange(len(both))] == both[torch.arange(len(both))]).all()
    assert again.metrics() == taken_over.metrics()
    env.close()


def test_what_crashes_is_left_out_and_a_budget_ends_it(tmp_path):
    faults = {3: ("raise", 0, 0), 5: ("exit", 3, 2)}  # the second comes to work in its third try
    env = make_toy_env(toy_spec(faults, tmp_path), 2, 2)
    policy, episodes = tiny_policy(env.simulator_spec), [Episode(0, trial, 4) for trial in range(8)]
    visited = collected(env, policy, episodes)
    taken_over = Interventions(policy, budget=10, **UNDISTURBED)
    taken_over.extend(env, episodes, visited)
    assert taken_over.samples()[keys.TRIAL_ID].unique().tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert taken_over.actions > 10
    kept = len(taken_over.samples())
    taken_over.extend(env, episodes, visited)
    assert len(taken_over.samples()) == kept
    env.close()


def test_where_the_expert_solves_nothing_nothing_is_kept(tmp_path):
    env = make_toy_env(toy_spec({}, tmp_path), 2, 2)
    policy, episodes = tiny_policy(env.simulator_spec), [Episode(0, 0, 4)]
    taken_over = Interventions(policy, max_steps=1, **UNDISTURBED)
    taken_over.extend(env, episodes, collected(env, policy, episodes))
    assert taken_over.metrics() == {"interventions/decisions": 0.0, "interventions/actions": 0.0}
    with pytest.raises(RuntimeError, match="the scripted expert solved none of 1 episodes"):
        record_demonstrations(env, policy, episodes, max_steps=1)
    env.close()


def test_with_nothing_to_clone_it_says_so(tmp_path):
    with pytest.raises(RuntimeError, match="there is nothing to clone"):
        Interventions(tiny_policy(toy_spec({}, tmp_path))).samples()
