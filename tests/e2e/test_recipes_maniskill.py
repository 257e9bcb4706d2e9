"""The recipes on real ManiSkill: two iterations of PPO with the small policy, from an expert, and with tiny OpenVLA."""

import json
import math

import pytest
from hydra.core.global_hydra import GlobalHydra
from openvla_checkpoint import make_checkpoint
from running import TOY, TOY_OF, composed, main_of
from simulators import needs_plate25, some

from vla_envs import make_spec
from vla_policies import SmallVLA, SmallVLAConfig

MANISKILL = ["env.num_envs=2", "env.num_workers=1", "env.image_size=48", "iterations=2"]
MANISKILL += ["eval.trials=1", "eval.videos=0"]


@pytest.fixture(autouse=True)
def hydra():
    yield
    GlobalHydra.instance().clear()


@needs_plate25
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("chosen_env", "family"),
    some([("maniskill_small", "openvla"), ("maniskill_small", "small"), ("maniskill_push_cube", "small")], 2),
)
def test_two_iterations(chosen_env, family, tmp_path):
    chosen = [
        f"policy={family}",
        "env.max_episode_steps=10",
        "demonstrations.episodes=1",
        "cloning.steps=2",
        "demonstrations.max_steps=80",
    ]
    if family == "openvla":
        checkpoint = make_checkpoint(tmp_path / "openvla")
        chosen = [
            "policy=openvla",
            f"policy.checkpoint={checkpoint}",
            "policy.value_head=true",
            "demonstrations.episodes=0",
        ]
        chosen += ["env.max_episode_steps=6"]
    main_of("ppo")(composed("ppo", [*TOY, *TOY_OF["ppo"], f"env={chosen_env}", *MANISKILL, *chosen], tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = next(line for line in lines if line["step"] == 2 and "env/success_once" in line)
    assert last["env/worker_restarts"] == 0
    assert math.isfinite(last["train/loss"])
    assert (tmp_path / "run" / "policy").is_dir()


@needs_plate25
@pytest.mark.timeout(900)
def test_the_out_of_distribution_table(tmp_path, capsys):
    spec = make_spec("maniskill/plate25-ood", image_size=48)
    shape = (spec.action_low, spec.action_high, spec.state_dim)
    SmallVLA(SmallVLAConfig(*shape)).save_pretrained(tmp_path / "policy")
    settings = ["env=maniskill_small", "env.id=maniskill/plate25-ood", "env.num_envs=2", "env.num_workers=1"]
    settings += ["env.image_size=48", "env.max_episode_steps=5", "eval.trials=1", "eval.videos=0"]
    settings += [f"policy.checkpoint={tmp_path / 'policy'}", "eval.mean_of=[Vision,Semantic,Execution]"]
    main_of("evaluate")(composed("evaluate", settings, tmp_path / "run"))
    said = capsys.readouterr().out
    rows = [line.split("  ")[0] for line in said.splitlines() if line.startswith(("PutOnPlate", "all "))]
    assert len(rows) == 16 + 4 + 1
    assert rows[-5:] == [
        *(f"all {group}" for group in ("Training", "Vision", "Semantic", "Execution")),
        "all tasks",
    ]
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    groups = [metrics[f"eval/group/{name}/success_once"] for name in ("Vision", "Semantic", "Execution")]
    # Not 0: some plates are so large that the object falls onto them by itself.
    assert metrics["eval/mean/success_once"] == pytest.approx(sum(groups) / 3)
    assert metrics["eval/num_episodes"] == 16
    assert f"mean of Vision, Semantic, Execution: success {100 * sum(groups) / 3:.1f}%, at end" in said
    GlobalHydra.instance().clear()
    with pytest.raises(ValueError, match=r"unknown group in eval\.mean_of 'Visoin'; did you mean Vision"):
        main_of("evaluate")(composed("evaluate", [*settings, "eval.mean_of=[Visoin]"], tmp_path / "other"))
