"""``other_trial`` in the real Meta-World: the policy sees just the images of the other episode, however it is run."""

import pytest
import torch
from noting import Noting
from tensordict.nn import TensorDictModuleBase

from vla_algos.ablations import SeenImages, other_trials
from vla_algos.evaluation import evaluate
from vla_common.keys import ACTION, IMAGES
from vla_envs import evaluation_episodes, make_env

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
CHUNK = 4
SUITE = "metaworld/reach-v3+button-press-topdown-v3"


class Reading(TensorDictModuleBase):
    """Moves by what some pixels say, so that what it sees decides where it goes."""

    in_keys, out_keys = [IMAGES], [ACTION]

    def forward(self, td):
        pixels = td[IMAGES][:, 8:24:4, 8:24:4].float().flatten(1).view(len(td), 4, -1).sum(-1)
        td[ACTION] = ((pixels % 100) / 50 - 1).unsqueeze(1).expand(-1, CHUNK, -1).contiguous()
        return td


def ablate(folder, num_envs, **options):
    """What the policy sees, as it is and with the images of others, and how the episodes went."""
    env = make_env(SUITE, num_envs, CHUNK, num_workers=1, image_size=32, render_quality="minimal", max_episode_steps=24)
    episodes = evaluation_episodes(env.simulator_spec, 3, seed=5)
    donors = other_trials(episodes, env.simulator_spec.tasks)
    try:
        with SeenImages(folder) as seen:
            normal = Noting(seen.keep, torch.clone)
            evaluate(env, Reading(), episodes, observe=normal, **options)
            ablated = Noting(seen.others(donors), torch.clone)
            result = evaluate(env, Reading(), episodes, observe=ablated, **options)
    finally:
        env.close()
    return donors, normal.seen, ablated.seen, result


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return ablate(tmp_path_factory.mktemp("alone"), 1)


def test_the_policy_sees_another_trial_of_its_task_and_acts_upon_it(alone):
    donors, normal, ablated, result = alone
    assert donors == [2, 3, 4, 5, 0, 1]  # tasks are interleaved
    lengths = [1 + max(decision for own, decision in normal if own == index) for index in range(6)]
    for (index, decision), image in ablated.items():
        other = donors[index]
        assert torch.equal(image, normal[other, min(decision, lengths[other] - 1)])
        assert not torch.equal(image, normal[index, 0]), "trials look different"
    assert {index for index, _ in ablated} == set(range(6))
    assert len(result.finished) == 6


@pytest.mark.parametrize("options", [{}, {"stages": 2, "overlap_resets": True}])
def test_it_is_the_same_with_other_slots_and_stages(alone, tmp_path, options):
    _, normal, ablated, result = alone
    _, theirs, shown, again = ablate(tmp_path, 4, **options)
    for mine, found in ((normal, theirs), (ablated, shown)):
        assert mine.keys() == found.keys()
        assert all(torch.equal(image, found[place]) for place, image in mine.items())
    assert again.episodes == result.episodes
