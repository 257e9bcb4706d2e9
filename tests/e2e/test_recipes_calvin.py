"""The experiments of CALVIN and their evaluations on the real scenes, with tiny OpenVLA-OFT, pi0 and pi0.5.

Until the first task of the chain is done a controller acts in the policy's place; from then on the policy itself.
"""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from openvla_checkpoint import make_checkpoint as make_openvla
from pi0_checkpoint import make_checkpoint as make_pi0
from running import CONF, composed, main_of
from simulators import some

import vla_envs.calvin.package as package
from vla_algos.run.training_env import evaluation_defaults
from vla_common import keys
from vla_common.texts import to_strings
from vla_envs.calvin import chains
from vla_envs.calvin.spec import spoken
from vla_envs.workers.pool import WorkerPool
from vla_policies import OpenVLAOFT, Pi0

pytestmark = pytest.mark.skipif(
    bool(package.CHECKOUT.missing(package.CHECKOUT.places()[0])),
    reason="no checkout of calvin_env: type python -m vla_envs fetch calvin",
)
BUTTON = torch.tensor([-0.12, -0.12, 0.472])  # of the LED in scene D, m
CHAIN = next(chain for chain in chains.published_chains() if chain[1][0] == "turn_on_led")
TURN_ON_LED = spoken("turn_on_led", "validation") + spoken("turn_on_led", "training")
SIMULATOR = ["env.num_envs=1", "env.num_workers=1", "eval.videos=0", "eval.trials=1"]
TRAINING = [*SIMULATOR, "env.max_episode_steps=25", "iterations=1", "update.epochs=1", "optim.lr=1e-3"]
TRAINING += ["update.micro_batch_size=2"]
OFT = ["policy.unnorm_key=null", "env.image_size=32", "env.wrist_camera=false"]
EXPERIMENTS = {
    "calvin_d_d_ppo_openpi": "pi0_tiny",
    "calvin_d_d_ppo_openpi_pi05": "pi05_tiny",
    "calvin_abc_d_grpo_openvlaoft": "openvla_oft",
}


@pytest.fixture(autouse=True)
def hydra():
    yield
    GlobalHydra.instance().clear()


@pytest.fixture
def one_chain(monkeypatch):
    """Let every episode be the published chain :data:`CHAIN`, whatever trial was drawn."""
    number, begin = chains.published_chains().index(CHAIN), WorkerPool._restore_send

    def restore_send(pool, running):
        episodes = {slot: (replace(episode, trial_id=number), done) for slot, (episode, done) in running.items()}
        return begin(pool, episodes)

    monkeypatch.setattr(WorkerPool, "_restore_send", restore_send)


def checkpoint(family, folder):
    return f"policy.checkpoint={make_openvla(folder) if family == 'openvla_oft' else make_pi0(folder, family)}"


def press(hand, chunk_size):
    """Actions ``[chunk_size, 7]`` towards the button, from above, with a closed hand at ``[3]``, m."""
    actions = torch.zeros(chunk_size, 7)
    actions[:, 6] = -1
    for action in actions:
        over = (hand - BUTTON)[:2].norm() < 0.012
        action[:3] = ((BUTTON + torch.tensor([0, 0, -0.1 if over else 0.12]) - hand) / 0.02).clamp(-1, 1)
        hand = hand + 0.02 * action[:3]
    return actions


@pytest.fixture
def acting(monkeypatch):
    """Let policies :func:`press` while they are told to; ``decisions`` have instruction and prompt of each."""
    acting = SimpleNamespace(decisions=[], presses=lambda decision: True)

    def replace(policy_class):
        act = policy_class.forward

        def forward(policy, tensordict):
            told, hand = to_strings(tensordict)[0], tensordict[keys.STATES][0, :3].clone()
            tensordict = act(policy, tensordict)
            if told in TURN_ON_LED and acting.presses(len(acting.decisions)):
                tensordict[keys.ACTION] = press(hand, policy.chunk_size).unsqueeze(0)
            acting.decisions.append((told, tuple(tensordict[keys.PROMPT_TOKENS][0].tolist())))
            return tensordict

        monkeypatch.setattr(policy_class, "forward", forward)

    replace(Pi0)
    replace(OpenVLAOFT)
    return acting


def check_prompts(decisions):
    """The policy reads the sentence of the first task until that is done, and then at once that of the second.

    Returns:
        The number of decisions for the first task.
    """
    told = [text for text, _ in decisions]
    change = next(number for number, text in enumerate(told) if text not in TURN_ON_LED)
    second = spoken(CHAIN[1][1], "validation") + spoken(CHAIN[1][1], "training")
    assert set(told[change:]) <= set(second)
    before, after = ({prompt for _, prompt in part} for part in (decisions[:change], decisions[change:]))
    assert len(before) == len(after) == 1
    assert before != after
    return change


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("experiment", "family"), some(EXPERIMENTS.items(), 2))
@pytest.mark.usefixtures("one_chain")
def test_experiments_train_and_follow_the_instruction(experiment, family, acting, tmp_path):
    name = "grpo" if family == "openvla_oft" else "ppo"
    small = [f"experiment={experiment}", checkpoint(family, tmp_path / "checkpoint"), *TRAINING]
    if name == "grpo":
        small += [*OFT, "group_size=2", "collector.groups=1", "collector.max_groups=1", "update.minibatches=2"]
        small += ["env.id=calvin/D", "env.sentences=training"]  # where the button is known
        small += ["eval.sampled=false", "eval.temperature=null"]  # on a chain of lh-mtlc, cut off after 25 steps too
        acting.presses = lambda decision: decision // 25 == 1  # first run of the group; an episode has 25 decisions
    else:
        small += ["collector.decisions=6", "update.minibatch_size=4", "policy.num_steps=2"]
    main_of(name)(composed(name, small, tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = next(line for line in lines if "train/loss" in line)
    assert math.isfinite(trained["train/loss"])
    # The whole of OpenVLA-OFT computes in bfloat16, where batches of another size round differently.
    assert trained["train/actor/log_ratio_at_start"] < (1e-2 if name == "grpo" else 1e-5)
    assert trained["env/worker_restarts"] == 0
    if name == "ppo":  # 5 decisions of evaluation, then an episode of 5 and the first of the next
        assert check_prompts(acting.decisions[5:10]) == 4  # done in the midst of the fourth chunk
        assert acting.decisions[10] == acting.decisions[5]
        assert trained["env/return"] >= 1
    else:
        assert check_prompts(acting.decisions[25:50]) > 4
        assert len(set(acting.decisions[50:75])) == 1  # the other run of the group, and its sentence is the same
        assert acting.decisions[50] == acting.decisions[25]
        assert trained["rollout/groups_trained"] == 1
    assert (tmp_path / "run" / "policy").is_dir()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("experiment", "family"), some(EXPERIMENTS.items(), 2))
@pytest.mark.usefixtures("one_chain")
def test_experiments_evaluate_and_follow_the_instruction(experiment, family, acting, tmp_path):
    small = [f"experiment={experiment}", checkpoint(family, tmp_path / "checkpoint"), *SIMULATOR]
    small += ["policy.num_action_chunks=5"]
    if family == "openvla_oft":
        small += OFT
    else:
        small += ["policy.num_steps=1"]
    main_of("evaluate")(composed("evaluate", evaluation_defaults(small, CONF), tmp_path / "run"))
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["eval/return"] >= 1
    assert metrics["eval/episode_len"] >= 16 + 360  # the steps for the second task begin when the first is done
    assert metrics["greedy"] == (family == "openvla_oft")
    assert check_prompts(acting.decisions[:8]) == 4  # the fourth chunk ended with the first task
