"""Everything that works with a VLAEnv works with one under TorchRL's transforms, and resumes there to the bit."""

import importlib.util

import pytest
import torch
from forked import forks
from paths import ROOT
from tensordict import TensorDict
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import (
    CatFrames,
    Compose,
    EnvCreator,
    InitTracker,
    ObservationNorm,
    ParallelEnv,
    RewardScaling,
    RewardSum,
    StepCounter,
    ToTensorImage,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)
from torchrl.envs.utils import RandomPolicy, check_env_specs
from toy import CHUNK, DIM, ToyActorCritic, ToyPolicy
from walker import walker_spec

from vla_algos import EpisodeCollector, StepCollector, collect_groups, evaluate, gae, grpo
from vla_algos.metrics import env_metrics
from vla_common import keys
from vla_common.keys import NEXT
from vla_envs import EpisodeQueue, EpisodeSampler, evaluation_episodes, make_env
from vla_envs.env import VLAEnv, base_env
from vla_envs.resume import save_state

N, T = 3, 2
OUTCOMES = (keys.STEP_REWARDS, keys.STEP_MASK, keys.SUCCESS, keys.SUCCESS_AT_END, keys.EPISODE_RETURN)
OUTCOMES += (keys.EPISODE_LEN, keys.CRASHED, keys.ACTIONS_CLIPPED)


def walker(num_envs=N, seed=0, **options):
    spec = walker_spec(horizon=11, action_dim=DIM, **options)
    return make_env(spec, num_envs, CHUNK, seed=seed, num_workers=1)


def frames():
    return CatFrames(N=3, dim=-1, in_keys=[keys.STATES])


def many():
    return Compose(
        frames(),
        ObservationNorm(loc=0.25, scale=0.5, in_keys=[keys.STATES]),
        RewardSum(in_keys=[keys.REWARD]),
        StepCounter(),
        InitTracker(),
        RewardScaling(0.0, 2.0, in_keys=[keys.REWARD, keys.STEP_REWARDS]),
    )


TRANSFORMS = {
    "none": None,
    "frames": frames,
    "many": many,
    "images": lambda: Compose(ToTensorImage(in_keys=[keys.IMAGES], out_keys=["pixels"]), frames()),
    "running mean": lambda: Compose(frames(), VecNormV2(in_keys=[keys.STATES], out_keys=["normal"])),
    "running mean, first version": lambda: Compose(VecNorm(in_keys=[keys.STATES], out_keys=["normal"]), frames()),
}


def transformed(name, **options):
    env = walker(**options)
    return env if TRANSFORMS[name] is None else TransformedEnv(env, TRANSFORMS[name]())


def new_collector(name):
    torch.manual_seed(0)
    policy = ToyActorCritic()
    if "running" in name:
        policy.loss_keys = [*policy.loss_keys, "normal"]
    return StepCollector(transformed(name), policy, T)


def collect(collector, batches):
    return [collector.rollout().to_dict() for _ in range(batches)]


def go_on(name, state, result):
    """What the process does that goes on."""
    saved = torch.load(state, weights_only=True)
    collector = new_collector(name)
    collector.load_state_dict(saved["collector"])
    torch.set_rng_state(saved["random"])
    torch.save(collect(collector, 3), result)
    collector.shutdown()


def tensors(td):
    return {key: td[key] for key in td.keys(True, True)}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for key, value in first.items():
        if isinstance(value, dict):
            assert_same(value, second[key])
        else:
            torch.testing.assert_close(value, second[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_run_that_was_killed_goes_on_to_the_bit(name, tmp_path):
    whole = new_collector(name)
    expected = collect(whole, 6)
    whole.shutdown()

    collector = new_collector(name)
    begun = collect(collector, 3)
    torch.save({"collector": collector.state_dict(), "random": torch.get_rng_state()}, tmp_path / "state.pt")
    collector.shutdown()
    process = forks().Process(target=go_on, args=(name, tmp_path / "state.pt", tmp_path / "r"))
    process.start()
    process.join()

    for first, second in zip(expected, begun + torch.load(tmp_path / "r", weights_only=True), strict=True):
        assert_same(first, second)
    elapsed = torch.stack([batch[NEXT][keys.EPISODE_LEN] for batch in expected])
    assert (elapsed[2, :, -1] % 11 != 0).any()  # it was killed in the middle of episodes


def test_only_what_the_environment_cannot_give_again_is_saved():
    collector = new_collector("many")
    collector.rollout()
    state = collector.state_dict()["environment"]["observation"]
    stored = {key for key, value in state.items() if value is not None}
    assert stored == {keys.STATES, "episode_reward", "step_count", "is_init"}
    assert state[keys.STATES].shape == (N, 9)
    plain = new_collector("none")
    plain.rollout()
    assert set(plain.state_dict()["environment"]["observation"].values()) == {None}


def test_other_transforms_are_refused():
    collector = new_collector("frames")
    collector.rollout()
    state = collector.state_dict()
    for name, message in (("none", "0; resume with"), ("running mean", "other transforms")):
        with pytest.raises(ValueError, match=message):
            new_collector(name).load_state_dict(state)


def test_the_state_is_what_it_was_when_it_was_taken():
    collector = new_collector("frames")
    collector.rollout()
    state = collector.state_dict()
    before = state["environment"]["transforms"][0]["_cat_buffers_states"].clone()
    collector.rollout()
    assert torch.equal(state["environment"]["transforms"][0]["_cat_buffers_states"], before)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_evaluation_gives_the_same_results_under_transforms(name):
    episodes = evaluation_episodes(walker_spec(), trials=2)
    policy = Straight()
    plain = evaluate(walker(), policy, episodes, record=1)
    other = evaluate(transformed(name), policy, episodes, record=1)
    assert plain.episodes == other.episodes  # the returns too: they are the environment's own
    assert plain.success_once == 1
    assert (plain.videos[0] == other.videos[0]).all()
    assert evaluate(transformed(name), policy, []).episodes == []


def test_an_evaluation_of_nothing_leaves_a_running_environment_alone():
    env = TransformedEnv(walker(), frames())
    env.rollout(2)
    assert evaluate(env, Straight(), []).episodes == []
    assert isinstance(base_env(env).episodes, EpisodeSampler)


def test_images_that_a_transform_has_changed_are_not_filmed():
    env = TransformedEnv(walker(), ToTensorImage(in_keys=[keys.IMAGES]))
    with pytest.raises(ValueError, match=r"record=1.*out_keys"):
        evaluate(env, Straight(), evaluation_episodes(walker_spec(), trials=1), record=1)


def test_groups_are_scored_by_the_reward_that_a_transform_makes():
    def run(transform):
        torch.manual_seed(0)
        env = TransformedEnv(walker(), transform)
        collector = EpisodeCollector(env, ToyPolicy())
        groups = collect_groups(collector, EpisodeSampler(walker_spec(), 1, group_size=3), groups=2, max_groups=2)
        return groups, grpo(groups)

    plain, batch = run(frames())
    doubled, other = run(Compose(frames(), RewardScaling(0.0, 2.0, in_keys=[keys.REWARD])))
    assert batch is not None
    for first, second in zip(plain, doubled, strict=True):
        torch.testing.assert_close(2 * first.scores, second.scores)
    torch.testing.assert_close(batch[keys.ADVANTAGE], other[keys.ADVANTAGE], rtol=1e-4, atol=1e-5)


def test_the_state_of_transforms_survives_between_groups():
    torch.manual_seed(0)
    first = EpisodeCollector(transformed("running mean"), ToyPolicy(), evaluation_episodes(walker_spec(), trials=1))
    list(first.iterator())
    second = EpisodeCollector(transformed("running mean"), ToyPolicy())
    second.load_state_dict(first.state_dict())
    assert_same(first.env.transform[1].state_dict(), second.env.transform[1].state_dict())


def test_a_reward_that_was_changed_alone_is_refused_per_action():
    def batch(*reward_keys):
        env = TransformedEnv(walker(), RewardScaling(0.0, 3.0, in_keys=list(reward_keys)))
        torch.manual_seed(0)
        return StepCollector(env, ToyActorCritic(CHUNK), 6).rollout()

    with pytest.raises(ValueError, match=r"reward_level='action'.*step_rewards.*in_keys=\['reward', 'step_rewards'\]"):
        gae(batch(keys.REWARD), reward_level="action")
    gae(batch(keys.REWARD, keys.STEP_REWARDS), reward_level="action")


def test_a_reward_of_ones_own():
    spec = importlib.util.spec_from_file_location("custom_reward", ROOT / "examples" / "custom_reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    batches = []
    for env in (walker(), TransformedEnv(walker(), module.ActionCost(0.5))):
        torch.manual_seed(0)
        batches.append(StepCollector(env, ToyActorCritic(CHUNK), 6).rollout())
    plain, other = batches  # the policy's actions are all 1 or -1
    mask = plain[NEXT, keys.STEP_MASK]
    assert torch.equal(other[NEXT, keys.STEP_REWARDS], (plain[NEXT, keys.STEP_REWARDS] - 0.5) * mask)
    assert torch.equal(other[NEXT, keys.EPISODE_RETURN], plain[NEXT, keys.EPISODE_RETURN])
    gae(other, reward_level="action")


def test_several_environments_are_refused_with_what_would_be_right():
    env = ParallelEnv(2, walker, serial_for_single=False)
    for collector in (StepCollector, EpisodeCollector):
        with pytest.raises(TypeError, match=r"one VLAEnv.*not ParallelEnv.*make_env"):
            collector(env, ToyPolicy(), *([2] if collector is StepCollector else []))


def test_specs_and_the_outcomes_are_no_observations():
    env = walker()
    check_env_specs(env)
    assert not set(OUTCOMES) & set(env.observation_spec.keys())
    assert not set(OUTCOMES) & set(env.reset().keys())
    assert set(OUTCOMES) < set(env.rollout(2)[NEXT].keys())


def test_outcomes_survive_compact_obs():
    env = walker()
    (batch,) = Collector(env, RandomPolicy(env.action_spec), frames_per_batch=8, total_frames=8, compact_obs=True)
    assert set(OUTCOMES) < set(batch[NEXT].keys())
    assert not {keys.IMAGES, keys.STATES} & set(batch[NEXT].keys())


def test_copies_without_a_seed_run_different_episodes(forked_processes):
    def trials(make):
        env = make()
        collector = MultiSyncCollector([make] * 2, RandomPolicy(env.action_spec), frames_per_batch=12, total_frames=12)
        (batch,) = collector
        collector.shutdown()
        env.close()
        return batch[keys.TRIAL_ID].reshape(2, -1).tolist()

    first, second = trials(lambda: walker(seed=None))
    assert first != second


def test_state_dict_goes_on_with_the_sampler_and_the_running_episodes():
    env, other = walker(), walker()
    actions = torch.rand(8, N, CHUNK, DIM) * 2 - 1
    td = env.reset()
    for action in actions[:5]:
        _, td = env.step_and_maybe_reset(td.set(keys.ACTION, action))
    other.load_state_dict(env.state_dict())
    again = other.observe()
    for action in actions[5:]:
        first, td = env.step_and_maybe_reset(td.set(keys.ACTION, action))
        second, again = other.step_and_maybe_reset(again.set(keys.ACTION, action))
        assert_same(tensors(first), tensors(second))
    assert env.episodes.state_dict() == other.episodes.state_dict()


def test_a_state_of_other_chunks_is_refused_before_anything_changes():
    env, other = walker(), make_env(walker_spec(horizon=11, action_dim=DIM), N, CHUNK + 1, num_workers=1)
    env.reset()
    with pytest.raises(ValueError, match=f"the saved run had chunk_size={CHUNK}, this one has {CHUNK + 1}"):
        other.load_state_dict(env.state_dict())
    assert other.episodes.state_dict()["drawn"] == 0


def test_a_queue_is_saved_as_well():
    episodes = evaluation_episodes(walker_spec(), trials=3)
    env, other = walker(), walker()
    for one, content in ((env, episodes), (other, [])):
        one.set_episodes(EpisodeQueue(content))
    env.reset()
    other.load_state_dict(env.state_dict())
    assert other.current_episodes == env.current_episodes
    assert [other.episodes.next().queue_index for _ in range(3)] == [3, 4, 5]
    with pytest.raises(ValueError, match="EpisodeSampler, this is an EpisodeQueue"):
        other.load_state_dict(walker().state_dict())


def test_an_env_creator_does_not_make_its_copies_repeat_one_state():
    creator = EnvCreator(lambda: walker(seed=None))
    first, second = creator(), creator()
    assert first.episodes.seed != second.episodes.seed


def test_a_source_without_episodes_is_refused():
    with pytest.raises(TypeError, match="EpisodeSampler or an EpisodeQueue, got list"):
        walker().set_episodes(evaluation_episodes(walker_spec(), trials=1))


@pytest.mark.parametrize("use", ["reset", "step", "load"])
def test_a_closed_environment_says_so(use):
    env = walker()
    td = env.rand_action(env.reset())
    state = env.state_dict()
    env.close()
    assert env.is_closed
    uses = {"reset": env.reset, "step": lambda: env.step(td), "load": lambda: env.load_state_dict(state)}
    with pytest.raises(RuntimeError, match=r"\(walker\) is closed; make a new one with make_env"):
        uses[use]()


class Straight(ToyPolicy):
    """Goes where ``reach`` says."""

    def __init__(self, reach=1.0):
        super().__init__()
        self.reach = reach

    def forward(self, td):
        side = [1.0 if text == "go right" else -1.0 for text in td[keys.TASK_DESCRIPTIONS]]
        super().forward(td)
        return td.set(keys.ACTION, self.reach * torch.tensor(side).view(-1, 1, 1).expand(-1, CHUNK, DIM).contiguous())


@pytest.mark.parametrize(("reach", "clips", "share"), [(1.0, True, 0), (1.5, True, 1), (1.5, False, 0)])
def test_what_the_simulator_clips_is_counted(reach, clips, share):
    env = walker(clips_actions=clips)
    assert env_metrics(StepCollector(env, Straight(reach), 4).rollout())["env/actions_clipped"] == share
    episodes = list(EpisodeCollector(env, Straight(reach), evaluation_episodes(env.simulator_spec, trials=1)))
    assert env_metrics(torch.cat(episodes))["env/actions_clipped"] == share


def test_elements_that_were_not_executed_are_not_counted():
    env = make_env(walker_spec(horizon=4, goal=100.0, action_dim=2), 1, 3, seed=0)
    action = torch.zeros(1, 3, 2)
    action[0, 0, 0] = action[0, 2] = 2.0
    td = env.step(env.reset().set(keys.ACTION, action))
    assert td[NEXT, keys.ACTIONS_CLIPPED].item() == pytest.approx(3 / 6)
    td = env.step(td[NEXT].set(keys.ACTION, action))
    assert td[NEXT, keys.STEP_MASK].tolist() == [[True, False, False]]
    assert td[NEXT, keys.ACTIONS_CLIPPED].item() == pytest.approx(1 / 2)


def test_absurd_actions_are_refused():
    env = walker()
    td = env.reset()
    env.step(td.set(keys.ACTION, torch.full((N, CHUNK, DIM), 1900.0)))
    action = torch.zeros(N, CHUNK, DIM)
    action[1] = 1e6
    with pytest.raises(ValueError, match=r"1000 times.*environments \[1\].*units"):
        env.step(td.set(keys.ACTION, action))


def test_base_env_is_found_under_nested_transforms():
    env = walker()
    nested = TransformedEnv(TransformedEnv(env, frames(), auto_unwrap=False), StepCounter(), auto_unwrap=False)
    assert base_env(nested) is base_env(env) is env
    assert isinstance(env, VLAEnv)
    assert len(save_state(nested, nested.reset())["transforms"]) == 2
    assert isinstance(nested.rollout(2), TensorDict)


def test_episodes_that_are_set_on_the_wrapper_are_refused():
    env = TransformedEnv(walker(), StepCounter())
    env.episodes = EpisodeSampler(walker_spec(), 3)
    with pytest.raises(ValueError, match=r"type env.set_episodes\(...\) instead"):
        evaluate(env, ToyPolicy(), [])
    del env.episodes
    env.set_episodes(EpisodeSampler(walker_spec(), 3))  # the wrapper passes it on
    assert base_env(env).episodes.seed == 3
