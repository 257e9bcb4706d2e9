"""What is executed in training is kept: each action once, whatever was interrupted, and episodes are joined again."""

from types import SimpleNamespace

import pytest
import torch
from toy import ToyActorCritic, ToyEnv, ToyPolicy

from vla_algos import EpisodeCollector, StepCollector
from vla_algos.results import TRAINED, part_of, read_training
from vla_algos.run import TrainVideos
from vla_common.keys import ACTION, CRASHED, DONE, EPISODE_LEN, NEXT, STEP_MASK, SUCCESS, TRIAL_ID
from vla_envs.simulator import Episode

TASKS = [SimpleNamespace(name=f"task-{number}", group="") for number in range(2)]
SPEC = SimpleNamespace(id="toy", control_frequency=12.0, batched="", tasks=TASKS)


def keeping(folder, spec=SPEC):
    run = SimpleNamespace(folder=folder, config=SimpleNamespace(env={"num_envs": 3}, seed=7))
    return TrainVideos(run, spec, keep_actions=True)


def collected(folder, iterations=4, decisions=3, crashes=None):
    torch.manual_seed(0)
    films = keeping(folder)
    collector = StepCollector(ToyEnv(3, crashes=crashes), ToyActorCritic(), decisions=decisions, step_hook=films.hook)
    batches = []
    for iteration in range(1, iterations + 1):
        with films.of(iteration, chunk_size=3):
            batches.append(collector.rollout())
    return torch.cat(batches, 1)


def expected(batch):
    """Actions and success by trial of the episodes that end in decisions ``[N, T]`` and did not crash."""
    found = {}
    for row in batch:
        ends = row[NEXT, DONE].flatten().nonzero().flatten().tolist()
        for begin, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
            episode = row[begin : end + 1]
            if not episode[NEXT, CRASHED].any():
                actions = episode[ACTION][episode[NEXT, STEP_MASK]]
                found[int(episode[TRIAL_ID][0])] = actions, bool(episode[NEXT, SUCCESS][-1])
    return found


def check(found, batch):
    wanted = expected(batch)
    assert len(found) == len(wanted) > 3
    for each in found:
        actions, success = wanted[each.episode.trial_id]
        assert torch.equal(torch.tensor(each.actions), actions)
        assert (each.episode.seed, each.success_once, each.episode_len) == (7, success, len(actions))
        assert each.task == f"task-{each.episode.task_id}"


@pytest.mark.parametrize("crashes", [None, {1: 1, 4: 1}])
def test_episodes_that_span_iterations_are_joined_and_crashed_ones_left_out(crashes, tmp_path):
    batch = collected(tmp_path, crashes=crashes)
    spanning = ~batch[NEXT, DONE][:, 2::3]  # an iteration ends in the middle of them
    assert spanning.any()
    assert bool(batch[NEXT, CRASHED].any()) == bool(crashes)
    check(read_training(tmp_path / TRAINED), batch)


def test_it_moves_no_bit_and_writes_nothing_unless_asked(tmp_path):
    kept, drawn = collected(tmp_path), torch.rand(1)
    torch.manual_seed(0)
    collector = StepCollector(ToyEnv(3), ToyActorCritic(), decisions=3)
    plain = torch.cat([collector.rollout() for _ in range(4)], 1)
    assert torch.equal(drawn, torch.rand(1))
    assert torch.equal(kept[ACTION], plain[ACTION])
    assert torch.equal(kept[NEXT, EPISODE_LEN], plain[NEXT, EPISODE_LEN])


def test_an_iteration_that_is_run_again_has_no_twin(tmp_path):
    """The second iteration of a process that died while it wrote the third is repeated."""
    batch = collected(tmp_path)
    path = tmp_path / TRAINED
    whole = path.read_text()
    torn = [line for line in whole.splitlines(keepends=True) if '"step": 4' not in line]
    path.write_text("".join(torn)[:-40])
    part_of(path, 1).write_text(torn[0] + torn[-1])  # of another process, when there were more
    films = keeping(tmp_path)
    with pytest.raises(KeyboardInterrupt), films.of(2, chunk_size=3):
        raise KeyboardInterrupt
    lines = path.read_text().splitlines(keepends=True)
    assert lines == [line for line in torn if '"step": 1' in line], (
        "and of an iteration that breaks off there is nothing"
    )
    assert part_of(path, 1).read_text() == torn[0]
    part_of(path, 1).unlink()

    torch.manual_seed(0)
    collector = StepCollector(ToyEnv(3), ToyActorCritic(), decisions=3, step_hook=films.hook)
    collector.rollout()  # what the checkpoint had; the process itself has seen none of it
    films = keeping(tmp_path)
    collector.step_hook = films.hook
    for iteration in (2, 3, 4):
        with films.of(iteration, chunk_size=3):
            collector.rollout()
    assert path.read_text() == whole
    check(read_training(path), batch)


def test_abandoned_episodes_are_left_out_and_a_queue_is_whole(tmp_path):
    films = keeping(tmp_path)
    episodes = [Episode(number % 2, number) for number in range(5)]
    collector = EpisodeCollector(ToyEnv(2), ToyPolicy(), episodes, step_hook=films.hook)
    with films.of(1, chunk_size=3):
        stopped = collector.iterator()
        next(stopped)
        stopped.close()
        visited = list(collector.iterator())
    found = read_training(tmp_path / TRAINED)
    assert {each.episode.trial_id for each in found} == set(range(5))
    lengths = {int(each[TRIAL_ID][0]): int(each[NEXT, EPISODE_LEN][-1]) for each in visited}
    assert lengths.items() <= {each.episode.trial_id: len(each.actions) for each in found}.items()


@pytest.mark.parametrize("other", [{"batched": "all"}, {"control_frequency": None}])
def test_what_cannot_be_simulated_once_more_is_refused(other, tmp_path):
    with pytest.raises(ValueError, match=r"train_videos.keep_actions=true: toy .*; leave it out"):
        keeping(tmp_path, SimpleNamespace(**{**vars(SPEC), **other}))
