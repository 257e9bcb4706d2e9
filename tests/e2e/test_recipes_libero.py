"""The recipes on real LIBERO: two iterations of PPO and GRPO with the small policy and with tiny OpenVLA-OFT."""

import json
import math

import pytest
from hydra.core.global_hydra import GlobalHydra
from openvla_checkpoint import make_checkpoint
from running import CONF, TOY, TOY_OF, composed, main_of
from simulators import libero_assets

from vla_algos.run.training_env import evaluation_defaults

libero_assets()

LIBERO = ["env=libero", "env.image_size=64", "env.render_quality=fast", "env.task_ids=[0,1]", "iterations=2"]
LIBERO += ["demonstrations.episodes=0", "eval.trials=1", "eval.videos=0"]


@pytest.fixture(autouse=True)
def hydra():
    yield
    GlobalHydra.instance().clear()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["ppo", "grpo"])
@pytest.mark.parametrize("family", ["small", "openvla_oft"])
def test_two_iterations(name, family, tmp_path, capfd):
    chosen = [f"policy={family}"]
    if family == "openvla_oft":
        chosen += [f"policy.checkpoint={make_checkpoint(tmp_path / 'openvla')}", "policy.layout=rlinf"]
        chosen += ["policy.num_action_chunks=2", "policy.num_images_in_input=1", "policy.use_proprio=false"]
        chosen += [f"policy.value_head={str(name == 'ppo').lower()}"]
    main_of(name)(composed(name, [*TOY, *TOY_OF[name], *LIBERO, *chosen], tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = next(line for line in lines if line["step"] == 2 and "env/success_once" in line)
    assert last["env/success_once"] == 0
    assert last["env/worker_restarts"] == 0
    if name == "ppo":
        assert math.isfinite(last["train/loss"])
        assert last["train/actor/log_ratio_at_start"] < 1e-5
    else:  # a policy that never succeeds has nothing to compare, which is said
        assert "none of 2 groups carries signal" in capfd.readouterr().out
    assert (tmp_path / "run" / "policy").is_dir()


def test_evaluation_presets(tmp_path):
    folder = make_checkpoint(tmp_path / "openvla")
    toy = ["env.num_envs=2", "env.num_workers=1", "env.max_episode_steps=8", "env.image_size=64"]
    toy += ["env.task_ids=[3]", "env.render_quality=fast", "eval.trials=2", "eval.videos=0"]
    chosen = ["experiment=libero_spatial_grpo_openvlaoft", f"policy.checkpoint={folder}", *toy]
    main_of("evaluate")(composed("evaluate", evaluation_defaults(chosen, CONF), tmp_path / "run"))
    metrics = (tmp_path / "run" / "metrics.json").read_text()
    assert '"eval/num_episodes": 4.0' in metrics
    assert '"greedy": false' in metrics
