"""Evaluation works off a fixed grid, completely and in its order."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torchrl.envs import StepCounter, TransformedEnv
from toy import CHUNK, DIM, INSTRUCTIONS, ToyEnv, ToyPolicy

from vla_algos.ablations import blank_images, swapped_instructions
from vla_algos.evaluation import TRAINING_ENV, EpisodeResult, EvaluationResult, evaluate
from vla_common.keys import ACTION, IMAGES, TASK_DESCRIPTIONS
from vla_envs.simulator import Episode
from vla_policies import SmallVLA, SmallVLAConfig, load_policy

GRID = [Episode(task_id=i % 2, trial_id=100 + i, seed=1) for i in range(10)]


class LookingPolicy(ToyPolicy):
    """Solves the task that the picture shows."""

    def forward(self, td):
        super().forward(td)
        td[ACTION] = (
            (td[IMAGES].float().mean((1, 2, 3)) > 100).float().mul(2).sub(1).view(-1, 1, 1).expand(-1, CHUNK, DIM)
        )
        return td


class ListeningPolicy(ToyPolicy):
    """Solves the task that the instruction names."""

    def forward(self, td):
        super().forward(td)
        signs = [1.0 if text == INSTRUCTIONS[1] else -1.0 for text in td[TASK_DESCRIPTIONS]]
        td[ACTION] = torch.tensor(signs).view(-1, 1, 1).expand(-1, CHUNK, DIM)
        return td


def slow_low(td):
    """The low task is shown as the high one: it takes to the horizon and fails."""
    td[IMAGES] = torch.full_like(td[IMAGES], 255)
    return td


@pytest.mark.parametrize("num_envs", [1, 3, 16])  # fewer and more slots than episodes
def test_every_episode_once_in_grid_order(num_envs):
    seen = []
    env = ToyEnv(num_envs)
    own = env.episodes
    result = evaluate(env, LookingPolicy(), GRID, observe=slow_low, on_episode=seen.append)
    assert [row.episode for row in result.episodes] == GRID
    assert [row.success_once for row in result.episodes] == [False, True] * 5
    assert [row.episode_len for row in result.episodes] == [7, 5] * 5
    assert sorted(map(id, seen)) == sorted(map(id, result.episodes))
    assert env.episodes is own
    if num_envs > 1:  # the successful ones are shorter: they finish before their turn
        assert [row.episode.trial_id for row in seen] != [episode.trial_id for episode in GRID]


def test_a_policy_of_other_states_is_refused_before_anything_runs():
    env, bounds = ToyEnv(2), {"action_low": (-1.0,) * DIM, "action_high": (1.0,) * DIM}
    env.simulator_spec = SimpleNamespace(
        id="toy", tasks=env.simulator_spec.tasks, chain_length=1, state_dim=3, wrist_image_shape=None, **bounds
    )
    begun = env.interactions
    with pytest.raises(ValueError, match=r"the policy has 5 action and 4 state dimensions, toy has 5 and 3; use it"):
        evaluate(env, SmallVLA(SmallVLAConfig(**bounds, state_dim=4, chunk_size=CHUNK)), GRID)
    assert env.interactions == begun


class PickyPolicy(LookingPolicy):
    def check_environment(self, shape):
        raise ValueError("not here")


def test_behind_transforms_a_policy_may_see_what_it_reads():
    with pytest.raises(ValueError, match="not here"):
        evaluate(ToyEnv(2), PickyPolicy(), GRID[:2])
    assert evaluate(TransformedEnv(ToyEnv(2), StepCounter()), PickyPolicy(), GRID[:2]).success_once == 1


def test_a_policy_that_was_trained_in_another_environment(tmp_path, recwarn):
    small = SmallVLA(SmallVLAConfig((-1.0,) * DIM, (1.0,) * DIM, state_dim=3, chunk_size=CHUNK))
    small.save_pretrained(tmp_path)
    policy, env = LookingPolicy(), ToyEnv(2)
    policy.loaded_from, env.simulator_spec.id = load_policy(tmp_path).loaded_from, "toy"
    assert policy.loaded_from == tmp_path
    note = {"evaluated_on": "toy", "protocol_deviations": ["training reward with something"]}
    evaluate(env, policy, GRID[:2])  # of whose training nothing is known
    for known in (note, {**note, "env": {"id": "toy"}, "evaluated_on": "toy/others"}):
        (tmp_path / TRAINING_ENV).write_text(json.dumps(known))
        evaluate(env, policy, GRID[:2])
    assert not [each for each in recwarn if "was trained" in str(each.message)]
    (tmp_path / TRAINING_ENV).write_text(json.dumps(note | {"protocol_deviations": ["free camera"]}))
    with pytest.warns(
        UserWarning, match=r"was trained for toy \(free camera\), and is evaluated on toy \(as the bench"
    ):
        evaluate(env, policy, GRID[:2])
    (tmp_path / TRAINING_ENV).write_text(json.dumps({"evaluated_on": "metaworld/reach-v3", "protocol_deviations": 5}))
    with pytest.warns(UserWarning, match=r"was trained for metaworld/reach-v3 .*and is evaluated on toy .*env_of"):
        evaluate(env, policy, GRID[:2])


def test_a_policy_without_a_folder_is_not_the_one_of_the_working_folder(tmp_path, monkeypatch, recwarn):
    (tmp_path / TRAINING_ENV).write_text(json.dumps({"evaluated_on": "metaworld/reach-v3"}))
    monkeypatch.chdir(tmp_path)
    evaluate(ToyEnv(2), LookingPolicy(), GRID[:2])
    assert not [each for each in recwarn if "was trained" in str(each.message)]


def test_numbers_and_table():
    result = evaluate(ToyEnv(4), LookingPolicy(), GRID, observe=slow_low)
    metrics = result.metrics()
    assert metrics["eval/success_once"] == metrics["eval/success_at_end"] == 0.5
    assert metrics["eval/task/task-0/success_once"] == 0
    assert metrics["eval/task/task-1/success_once"] == 1
    assert metrics["eval/task/task-0/success_at_end"] == 0
    assert metrics["eval/task/task-1/success_at_end"] == 1
    assert metrics["eval/episode_len"] == 6
    assert metrics["eval/return"] == 0.5
    assert metrics["eval/num_episodes"] == 10
    assert metrics["eval/crashed_episodes"] == 0
    low, high = result.interval
    assert low == pytest.approx(0.2366, abs=1e-4)
    assert high == pytest.approx(0.7634, abs=1e-4)
    header, *lines = result.table().splitlines()
    assert [line.split()[0] for line in lines] == ["task-0", "task-1", "all"]
    assert "50.0%" in lines[-1]
    assert "23.7 -  76.3" in lines[-1]
    assert "10" in lines[-1]
    assert len({len(line) for line in [header, *lines]}) == 1


def test_ablations_hit_only_the_policy_that_uses_the_input():
    env = ToyEnv(4)
    swap = swapped_instructions(env.simulator_spec.tasks)
    success = lambda policy, observe: evaluate(env, policy, GRID, observe=observe).success_once  # noqa: E731
    assert success(LookingPolicy(), None) == success(ListeningPolicy(), None) == 1.0
    assert success(LookingPolicy(), blank_images) == 0.5
    assert success(LookingPolicy(), swap) == 1.0
    assert success(ListeningPolicy(), blank_images) == 1.0
    assert success(ListeningPolicy(), swap) == 0.0


def test_swapping_needs_two_instructions():
    with pytest.raises(ValueError, match="at least 2 different"):
        swapped_instructions(ToyEnv(1).simulator_spec.tasks[:1])


def test_crashed_episodes_run_again_and_are_counted():
    crashes = {GRID[-1].trial_id: 2, GRID[0].trial_id: 99}  # the last one is crashed when the queue is empty
    result = evaluate(ToyEnv(4, crashes=crashes), LookingPolicy(), GRID)
    assert [row.crashed for row in result.episodes] == [True] + [False] * 9
    assert [row.attempts for row in result.episodes] == [3] + [1] * 8 + [3]
    assert result.metrics()["eval/crashed_episodes"] == 1
    assert result.metrics()["eval/num_episodes"] == 9
    assert result.success_once == 1.0
    assert result.table().splitlines()[-1].startswith("crashed: 1")
    assert "task-0 trial 100 seed 1" in result.table().splitlines()[-1]
    assert not result.failure


def test_without_a_finished_episode_there_is_no_result():
    env = ToyEnv(4, crashes={episode.trial_id: 99 for episode in GRID})
    result = evaluate(env, LookingPolicy(), GRID)
    assert result.finished == []
    assert result.failure.startswith("10 of 10 episodes have no result; every one crashed")
    assert "nan" not in result.table()
    assert len({len(line) for line in result.table().splitlines()[:-1]}) == 1
    some = evaluate(ToyEnv(4, crashes={GRID[0].trial_id: 99}), LookingPolicy(), GRID[:2])  # of task-0 there is none
    assert "nan" not in some.table()
    assert not some.failure


def test_recorded_frames():
    result = evaluate(ToyEnv(4), LookingPolicy(), GRID, record=3)
    assert list(result.videos) == [0, 1, 2]
    for place, frames in result.videos.items():
        # 5 actions in chunks of 3: two decisions, and the final frame
        assert frames.shape == (3, 4, 4, 3)
        assert (frames == 200 * (place % 2)).all()


def test_repeated_episodes_each_count():
    result = evaluate(ToyEnv(3), LookingPolicy(), [GRID[0]] * 5)
    assert len(result.episodes) == 5
    assert result.success_once == 1.0


def test_greedy_is_repeatable_and_sampling_follows_the_seed():
    torch.manual_seed(0)
    policy, env = ToyPolicy(), ToyEnv(4)
    assert evaluate(env, policy, GRID).episodes == evaluate(env, policy, GRID).episodes

    def sampled(seed):
        torch.manual_seed(seed)
        return evaluate(env, policy, GRID, greedy=False).episodes

    assert sampled(1) == sampled(1) != sampled(2)


def test_empty_grid():
    result = evaluate(ToyEnv(2), ToyPolicy(), [])
    assert result.episodes == []
    assert math.isnan(result.success_once)
    assert result.interval == (0.0, 1.0)


def test_mean_of_groups_of_unequal_size():
    def result(group, once, at_end=False, crashed=False):
        return EpisodeResult(GRID[0], "task", once, at_end, 0.0, 5, crashed=crashed, group=group)

    vision = [result("Vision", True, True), result("Vision", True), result("Vision", True, crashed=True)]
    execution = [result("Execution", place == 0) for place in range(4)]
    everything = [*vision, *execution, result("in distribution", True, True)]
    whole = EvaluationResult(everything, mean_of=("Vision", "Execution"))
    once, at_end = whole.mean_of_groups()
    assert (once.value, at_end) == (0.625, 0.25)
    assert 0.25 < once.low < once.value < once.high < 0.95
    assert whole.metrics()["eval/mean/success_once"] == 0.625
    assert whole.intervals()["eval/mean/interval"] == (once.low, once.high)
    assert "mean of Vision, Execution: success 62.5%, at end 25.0%; 95 % interval of success" in whole.table()


def test_the_mean_of_groups_needs_a_result_in_each():
    crashed = EpisodeResult(GRID[0], "task", False, False, 0.0, 5, crashed=True, group="hard")
    some = EpisodeResult(GRID[1], "task", True, True, 0.0, 5, group="easy")
    whole = EvaluationResult([crashed, some], mean_of=("easy", "hard"))
    assert whole.mean_of_groups() is None
    assert not [name for name in {**whole.metrics(), **whole.intervals()} if "mean" in name]
    assert "mean of easy, hard: none" in whole.table()
