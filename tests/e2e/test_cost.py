"""benchmarks/cost.py on tiny checkpoints; how fast anything is belongs to a quiet machine."""

import json
import sys

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from paths import GOLDEN, ROOT
from simulators import some

from vla_policies.pi0.model import Pi0ModelConfig
from vla_policies.tiny import make_tiny

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
sys.path.insert(0, str(ROOT))

from benchmarks import cost as cost_of_a_run
from benchmarks import flow, policies

PREFIX = ["decision: prefix at each step", "update: prefix in each minibatch"]
RUNS = {
    "metaworld_50_ppo_openpi": ("pi0", ["policy.norm_stats_id=tiny"], PREFIX),
    "metaworld_50_grpo_openvlaoft": ("openvla_oft_rlinf", ["policy.unnorm_key=tiny"], ["update: all rows"]),
    "metaworld_50_ppo_smolvla": ("smolvla_metaworld", [], PREFIX),
    "metaworld_ppo_small": (None, [], []),
}


def cost(*words):
    GlobalHydra.instance().clear()
    cost_of_a_run.main([*words, "--batches", "1,2", "--repetitions", "1"])


@pytest.mark.parametrize("experiment", some(RUNS, 3))
def test_all_parts_are_measured_and_shown(experiment, tmp_path, capsys):
    kind, settings, others = RUNS[experiment]
    if kind:
        settings = [*settings, f"policy.checkpoint={make_tiny(kind, tmp_path / kind)}"]
    cost(experiment, *settings, "env.num_envs=2", "env.num_workers=1", "--output", str(tmp_path / "cost.json"))
    result, said = json.loads((tmp_path / "cost.json").read_text()), capsys.readouterr().out
    assert all(each > 0 for each in result["ms_per_decision"].values())
    assert [row["batch"] for row in result["by_batch"]] == [1, 2]
    assert result["knee"] in (1, 2)
    assert result["share_of_a_product"] > 0
    assert result["hours"].keys() == {"rollouts", "updates", "evaluations"}
    assert result["GB"]["update, calculated"] >= result["GB"]["weights"] + result["GB"]["Adam"]
    assert {"rollout: a frame after each action", *others} <= result["beside_ours"].keys()
    assert all(name in said for name in ("decisions_per_s", "knee", "hours", *result["beside_ours"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["metaworld_ppo_smal"], "metaworld_ppo_smal: no experiment of ppo.py or grpo.py; vla-recipe list has them"),
        (["metaworld_50_ppo_openpi"], "policy=pi0 starts from a checkpoint"),
        (["metaworld_50_ppo_openpi", "--random", "tiny"], "--random: makes openvla_oft and pi0 for LIBERO"),
        (["metaworld_ppo_small", "policy.dimm=3"], "policy.dimm"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cost(*words)
    assert message in capsys.readouterr().err


def test_a_way_that_computes_something_else_is_noticed(monkeypatch):
    policy = policies.make_policy("tiny", "cpu", torch.float32, 0, False)
    batch, right = policies.make_batch(policy, 1), policies.action_positions
    assert next(cost_of_a_run.baselines(policy, batch))
    monkeypatch.setattr(policies, "action_positions", lambda policy, hidden: right(policy, hidden.roll(-1, 1)))
    with pytest.raises(AssertionError, match="not close"):
        next(cost_of_a_run.baselines(policy, batch))


def test_the_published_size_of_pi0_is_that_of_the_published_files():
    layout = json.loads((GOLDEN / "pi0_full_layout.json").read_text())
    assert flow.SIZES["published"] == Pi0ModelConfig.from_shapes(layout)
