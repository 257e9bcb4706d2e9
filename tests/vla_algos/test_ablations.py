"""What a policy is shown instead: who gets whose images when, however many slots and processes there are."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked import together
from noting import Noting
from tensordict import NonTensorStack, TensorDict
from toy import CHUNK, DIM, ToyEnv, ToyPolicy
from walker import walker_spec

from vla_algos import ablations, distributed
from vla_algos.ablations import DoNothing, SeenImages, check_reads, other_trials, swapped_instructions
from vla_algos.evaluation import evaluate
from vla_algos.run.evaluator import Evaluator
from vla_common.keys import ACTION, DECISION_INDEX, EPISODE_INDEX, IMAGES, STATES, TASK_DESCRIPTIONS, WRIST_IMAGES
from vla_common.texts import to_strings
from vla_envs.simulator import Episode, Task

TASKS = [Task("task-0", "go low"), Task("task-1", "go high")]
GRID = [Episode(task_id=i % 2, trial_id=i // 2, seed=1) for i in range(10)]


class PaintedEnv(ToyEnv):
    """Its picture is bright where the task is 1, and says in one pixel which trial it is and how many steps it has."""

    def _observe(self, **outcome):
        td = super()._observe(**outcome)
        td[IMAGES][:, 0, 0, 0] = td[STATES][:, 2].to(torch.uint8)
        td[IMAGES][:, 0, 0, 1] = td[STATES][:, 0].to(torch.uint8)
        return td


class Fickle(ToyPolicy):
    """Ends an episode early or late by its trial: trial 0 goes straight to the goal, others take to the horizon."""

    def forward(self, td):
        up = (td[STATES][:, 2] == 0) == (torch.tensor([text == "go high" for text in td[TASK_DESCRIPTIONS]]))
        td[ACTION] = up.float().mul(2).sub(1).view(-1, 1, 1).expand(-1, CHUNK, DIM).clone()
        return td


def first_pixel(image):
    """What tells the toy's images apart."""
    return tuple(image[0, 0, :2].tolist())


@pytest.mark.parametrize("num_envs", [1, 3, 16])
@pytest.mark.parametrize("crashes", [{}, {2: 2}])  # the trial dies in its second decision and begins again
def test_observers_know_which_decision_of_which_episode_it_is(num_envs, crashes):
    noting = Noting(lambda td: td, first_pixel)
    result = evaluate(PaintedEnv(num_envs, crashes=crashes), Fickle(), GRID, observe=noting)
    assert [row.attempts for row in result.episodes] == [1 + crashes.get(e.trial_id, 0) // 2 for e in GRID]
    steps = [5 if episode.trial_id == 0 else 7 for episode in GRID]
    expected = {
        (index, decision): (episode.trial_id, CHUNK * decision)
        for index, episode in enumerate(GRID)
        for decision in range(-(-steps[index] // CHUNK))
    }
    assert noting.seen == expected


def test_observers_change_nothing_but_what_they_say():
    without, seen = evaluate(PaintedEnv(3), ToyPolicy(), GRID), []
    policy = ToyPolicy()
    policy.forward = lambda td, forward=policy.forward: seen.append(set(td.keys())) or forward(td)
    torch.manual_seed(0)
    evaluate(PaintedEnv(3), policy, GRID, observe=lambda td: td)
    assert not any({EPISODE_INDEX, DECISION_INDEX} & keys for keys in seen)
    assert len(without.episodes) == 10


@pytest.mark.parametrize("num_envs", [1, 3, 16])
@pytest.mark.parametrize("crashes", [{}, {2: 2}])
def test_other_trial_shows_the_next_trial_at_the_same_decision_and_its_last_frame(num_envs, crashes, tmp_path):
    with SeenImages(tmp_path) as seen:
        evaluate(PaintedEnv(num_envs, crashes=crashes), Fickle(), GRID, observe=seen.keep)
        noting = Noting(seen.others(other_trials(GRID, TASKS)), first_pixel)
        ablated = evaluate(PaintedEnv(num_envs + 1), Fickle(), GRID, observe=noting)  # other slots, same images
    donor = lambda trial: (trial + 1) % 5  # noqa: E731
    last = lambda trial: CHUNK * (1 if trial == 0 else 2)  # noqa: E731  the first trial is over after two decisions
    for (index, decision), (trial, step) in noting.seen.items():
        other = donor(GRID[index].trial_id)
        assert (trial, step) == (other, min(CHUNK * decision, last(other)))
    assert {place for place in noting.seen if GRID[place[0]].trial_id == 4} >= {(8, 2), (9, 2)}  # frame 1 was held
    assert [row.success_once for row in ablated.episodes] == [e.trial_id == 0 for e in GRID], "state is its own"
    assert not list(tmp_path.iterdir()), "the images are gone"


def test_all_cameras_are_those_of_the_other_trial(tmp_path):
    def seen_by(shift):
        images = torch.arange(2 * 12).view(2, 2, 2, 3).to(torch.uint8) + shift
        wrist = torch.arange(2 * 2 * 3).view(2, 2, 1, 1, 3).to(torch.uint8) + 100 + shift
        where = {EPISODE_INDEX: torch.tensor([1, 0]), DECISION_INDEX: torch.zeros(2, dtype=torch.int64)}
        return TensorDict({IMAGES: images, WRIST_IMAGES: wrist, **where}, [2])

    with SeenImages(tmp_path) as seen:
        kept = seen.keep(seen_by(0))
        shown = seen.others([1, 0])(seen_by(50))
    assert torch.equal(shown[IMAGES], kept[IMAGES].flip(0))
    assert torch.equal(shown[WRIST_IMAGES], kept[WRIST_IMAGES].flip(0))


def test_who_sees_no_images_cannot_be_shown_others(tmp_path):
    td = TensorDict({EPISODE_INDEX: torch.tensor([0]), DECISION_INDEX: torch.tensor([0])}, [1])
    with SeenImages(tmp_path) as seen, pytest.raises(ValueError, match="reads neither 'images' nor 'wrist_images'"):
        seen.keep(td)


def test_images_without_room_are_refused_before_work(tmp_path, monkeypatch):
    spec = SimpleNamespace(image_shape=(480, 480), wrist_image_shape=None, max_episode_steps=100)
    free = SimpleNamespace(free=5e9)
    monkeypatch.setattr(ablations.shutil, "disk_usage", lambda folder: free)
    with SeenImages(tmp_path) as seen:
        seen.check_room(spec, 300, 5)
        with pytest.raises(OSError, match=r"up to 6.9 GB, and there are 5.0 GB free; take .*hydra.run.dir"):
            seen.check_room(spec, 500, 5)


def test_other_trials_are_a_permutation_without_fixed_point():
    repeated = GRID * 2
    donors = other_trials(repeated, TASKS)
    assert sorted(donors) == list(range(20))
    for index, donor in enumerate(donors):
        own, other = repeated[index], repeated[donor]
        assert own.task_id == other.task_id
        assert (own.trial_id + 1) % 5 == other.trial_id
        assert index // 10 == donor // 10, "the second run gets the second run"


def test_a_crashed_trial_is_passed_over():
    donors = other_trials(GRID, TASKS, usable=set(range(10)) - {2, 4})
    assert donors[0] == 6  # trials 1 and 2 of task 0 have no images
    assert donors[8] == 0
    assert other_trials(GRID, TASKS, needed=[8])[:9] == [-1] * 8 + [0]


def test_a_task_with_one_trial_is_refused():
    with pytest.raises(ValueError, match=r"task-1 has one trial only; type eval.trials=2 or more"):
        other_trials([*GRID[::2], GRID[1], GRID[1]], TASKS)
    with pytest.raises(ValueError, match="task-0 has no other trial with a result"):
        other_trials(GRID, TASKS, usable={0, *range(1, 10, 2)})


# ---- no action


def doing_nothing(neutral_action):
    """A benchmark that says so, of two states and two action dimensions."""
    walker = replace(walker_spec(), neutral_action=neutral_action)
    states = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    td = TensorDict({STATES: states[:, : walker.state_dim]}, [2])
    return DoNothing(walker, 3)(td)[ACTION]


def test_doing_nothing_is_what_the_benchmark_says():
    dims = walker_spec().action_dim
    assert torch.equal(doing_nothing((0.5,) * dims), torch.full((2, 3, dims), 0.5))
    found = doing_nothing(lambda states: np.repeat(2 * states[:1], dims))
    assert torch.equal(found, torch.tensor([2.0, 6.0]).view(2, 1, 1).expand(2, 3, dims))


def test_a_benchmark_that_does_not_say_what_doing_nothing_is_is_told_how():
    with pytest.raises(
        ValueError, match=r"unknown in .*make_spec say it: SimulatorSpec\(neutral_action=\.\.\.\), . numb"
    ):
        DoNothing(walker_spec(), 1)
    with pytest.raises(ValueError, match=r"neutral_action is .*must be the . numbers of an action that does nothing"):
        replace(walker_spec(), neutral_action=(0.0,) * 9)


# ---- several processes


class Suite(PaintedEnv):
    def __init__(self, num_envs):
        super().__init__(num_envs)
        toy = vars(self.simulator_spec)
        self.simulator_spec = SimpleNamespace(**toy, id="toy", trials=5, initial_states=None, evaluation_trials=None)


def ablate(folder):
    """What each process's policy sees, by the index among everybody's episodes."""
    evaluator, env = Evaluator(trials=5, seed=1, videos=0), Suite(2)
    with SeenImages(folder) as seen:
        evaluator.run("", env, Fickle(), folder / "normal.jsonl", observe=seen.keep)
        noting = Noting(seen.others(other_trials(evaluator.episodes(env.simulator_spec), TASKS)), first_pixel)
        evaluator.run("", env, Fickle(), folder / "ablated.jsonl", observe=noting)
    return noting.seen


def test_several_processes_show_what_one_shows(tmp_path):
    (tmp_path / "alone").mkdir()
    alone = ablate(tmp_path / "alone")
    assert distributed.world_size() == 1
    shares = together(ablate, tmp_path, tmp_path, processes=3, ends=(0, 0, 0))
    assert {place for share in shares for place in share} == set(alone)
    assert {place: image for share in shares for place, image in share.items()} == alone
    assert not list(tmp_path.glob(".seen*"))


# ---- instructions


def told(tasks):
    texts = [text for task in tasks for text in (task.instructions or (task.instruction,))]
    td = TensorDict({TASK_DESCRIPTIONS: NonTensorStack(*texts)}, [len(texts)])
    return dict(zip(texts, to_strings(swapped_instructions(tasks)(td)), strict=True))


def test_instructions_are_permuted_without_fixed_point():
    tasks = [Task(str(number), f"do {number}") for number in np.random.default_rng(0).permutation(50)]
    found = told(tasks)
    assert sorted(found.values()) == sorted(found)
    assert not [text for text, other in found.items() if text == other]
    assert told(tasks) == found


def test_tasks_that_share_words_get_others():
    same = [Task("a", "push"), Task("b", "pull"), Task("c", "push")]
    assert told(same) == {"push": "pull", "pull": "push"}
    overlapping = [
        Task("a", "push it", instructions=("push it", "shove it")),
        Task("b", "move it", instructions=("shove it", "slide it")),
        Task("c", "pull it"),
    ]
    found = told(overlapping)
    assert found["shove it"] == "pull it", "it is what both of the others may be told"
    assert found["push it"] == "pull it" or found["push it"] == "slide it"
    assert not [text for text, other in found.items() if text == other]


def pictures():
    random = np.random.default_rng(0)
    smooth = np.kron(random.integers(0, 256, (2, 4, 4, 3)), np.ones((1, 8, 8, 1))).astype(np.uint8)
    wrists = np.stack([smooth, smooth[:, ::-1]], 1)
    return TensorDict({IMAGES: torch.from_numpy(smooth), WRIST_IMAGES: torch.from_numpy(wrists.copy())}, [2])


@pytest.mark.parametrize("name", ablations.PICTURES)
def test_pictures_are_changed_alike_of_all_cameras_and_keep_their_size(name):
    own = pictures()
    changed = ablations.PICTURES[name](own.clone())
    for key in (IMAGES, WRIST_IMAGES):
        assert changed[key].shape == own[key].shape
        assert changed[key].dtype == torch.uint8
        assert not torch.equal(changed[key], own[key])
    assert torch.equal(changed[WRIST_IMAGES][:, 0], changed[IMAGES])
    assert torch.equal(changed[IMAGES], ablations.PICTURES[name](own.select(IMAGES))[IMAGES])


def test_what_scripts_do_with_pictures_is_what_their_names_say():
    own = pictures()[IMAGES].int()
    seen = {name: observe(pictures())[IMAGES].int() for name, observe in ablations.PICTURES.items()}
    assert torch.equal(seen["mirrored_images"], own.flip(2))
    assert torch.equal(seen["rotated_images"], own.flip(1, 2))
    assert (seen["jpeg_images"] - own).abs().float().mean() < 8
    assert torch.equal(seen["resized_images"][:, :2, :2], own[:, :2, :2])  # far from edges


def test_the_other_axis_angle_is_the_same_rotation():
    from scipy.spatial.transform import Rotation

    states = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32))
    states[0, 3:6] = 0.0
    other = ablations.other_axis_angle("libero")(TensorDict({STATES: states.clone()}, [6]))[STATES]
    assert torch.equal(other[:, :3], states[:, :3])
    assert torch.equal(other[:, 6:], states[:, 6:])
    assert (other[1:, 3:6] - states[1:, 3:6]).norm(dim=1).min() > 6.28
    same = Rotation.from_rotvec(states[:, 3:6]).inv() * Rotation.from_rotvec(other[:, 3:6])
    assert same.magnitude().max() < 1e-5
    with pytest.raises(ValueError, match="states of metaworld have no axis-angle"):
        ablations.other_axis_angle("metaworld")


def test_instructions_of_a_policy_that_reads_none_are_not_swapped():
    blind = SimpleNamespace(in_keys=[IMAGES])
    check_reads(blind, ["blank_images"])
    with pytest.raises(ValueError, match="reads no instructions; leave it out"):
        check_reads(blind, "swapped_instructions")
