"""At which temperature, and with which settings, a training run is evaluated."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from openvla_checkpoint import make_checkpoint
from toy import ToyPolicy, toy_suite

from vla_algos.run.environments import check_evaluated, evaluated_env
from vla_algos.run.evaluator import Evaluator, at_temperature, check_temperature
from vla_policies import load_policy


@dataclass(frozen=True)
class Tempered:
    temperature: float = 1.6


class Noting(ToyPolicy):
    """Notes at which temperature it was asked."""

    def __init__(self):
        super().__init__()
        self.config, self.asked = Tempered(), []

    def forward(self, td):
        self.asked.append(self.config.temperature)
        return super().forward(td)


def test_only_sampled_evaluations_are_at_another_temperature_and_training_keeps_its_own(tmp_path):
    policy = Noting()
    evaluator = Evaluator(videos=0, sampled=True, temperature=0.6)
    evaluator.run_both("", toy_suite(), policy, tmp_path)
    half = len(policy.asked) // 2
    assert half > 2
    assert policy.asked == sorted(policy.asked, reverse=True), "greedy first"
    assert set(policy.asked) == {1.6, 0.6}
    assert policy.config.temperature == 1.6

    class Failed(Exception):
        pass

    with pytest.raises(Failed), at_temperature(policy, 0.1):
        raise Failed
    assert policy.config.temperature == 1.6
    Evaluator(videos=0, sampled=True).run_both("", toy_suite(), policy, tmp_path / "own")
    assert set(policy.asked[2 * half + 2 :]) <= {1.6}


def test_openvla_samples_at_it(tmp_path):
    make_checkpoint(tmp_path / "openvla")
    policy = load_policy(tmp_path / "openvla", benchmark="libero")
    logits = torch.tensor([0.0, 2.0])
    trained = policy.distribution(logits).probs
    with at_temperature(policy, 0.5):
        assert torch.allclose(policy.distribution(logits).probs, (2 * logits).softmax(-1))
    assert torch.equal(policy.distribution(logits).probs, trained)


def test_a_temperature_that_nothing_samples_at_is_refused():
    with pytest.raises(ValueError, match=r"eval\.temperature=0\.6: is of sampled actions, .*type eval\.sampled=true"):
        Evaluator(temperature=0.6)
    policy = SimpleNamespace(config=SimpleNamespace(), family="toy")
    check_temperature(policy, None)
    with pytest.raises(ValueError, match="policy=toy does not sample at a temperature; leave it out"):
        check_temperature(policy, 0.6)


def test_what_evaluations_do_not_say_is_as_in_training():
    env = {"id": "metaworld/ML45-train", "image_size": 128, "num_envs": 8}
    assert evaluated_env(env, {"env": {"id": "metaworld/ML45-test"}}) == {**env, "id": "metaworld/ML45-test"}
    assert evaluated_env(env, {"env": None}) == evaluated_env(env, {"env": {}}) == evaluated_env(env, {}) == env
    check_evaluated(env, {"id": "metaworld/ML45-test", "max_episode_steps": 160})
    with pytest.raises(ValueError, match=r"eval\.env\.id=3: must be a valid string"):
        check_evaluated(env, {"id": 3})
