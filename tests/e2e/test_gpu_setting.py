"""What ``gpu=`` changes to save memory changes no update, on real Meta-World with tiny weights."""

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from openvla_checkpoint import make_checkpoint as make_openvla
from paths import CONF
from pi0_checkpoint import make_checkpoint as make_pi0
from running import TOY, TOY_OF, train
from safetensors.torch import load_file

from recipes.ppo import SETTINGS
from vla_algos.run.arguments import compose_settings
from vla_algos.run.config import read_config
from vla_algos.run.gpu import Load
from vla_common.experiments import as_typed
from vla_policies.tiny import make_tiny

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
FLOW = ["policy.num_steps=2", "policy.num_action_chunks=2"]
ADAM = ["optim.lr=1e-4", "optim.eps=1e-5"]  # a bias of keys has no gradient: its rounding must not be divided by itself
RUNS = {  # how the checkpoint is made, settings
    "openvla_oft": (make_openvla, ["policy.layout=official", "policy.num_action_chunks=2"]),
    "pi0": (lambda folder: make_pi0(folder, "pi0_tiny"), ["policy.config_name=pi0_metaworld", *FLOW]),
    "smolvla": (lambda folder: make_tiny("smolvla_metaworld", folder), FLOW),
}


@pytest.fixture(autouse=True)
def hydra():
    yield
    GlobalHydra.instance().clear()


@pytest.mark.parametrize("family", RUNS)
def test_what_saves_memory_changes_no_update(family, tmp_path):
    make, chosen = RUNS[family]
    chosen = [f"policy={family}", f"policy.checkpoint={make(tmp_path / 'checkpoint')}", *chosen, *ADAM]
    chosen += ["iterations=3", "update.minibatch_size=3"]
    load = Load(read_config(compose_settings("ppo", [*TOY, *TOY_OF["ppo"], *chosen], CONF), SETTINGS), 1, {})
    *_, least = load.updates()
    assert least.keys() >= {"update.micro_batch_size", "policy.gradient_checkpointing"}
    assert ("policy.prefix_cache_gb" in least) == (family != "openvla_oft")
    changes = {**least, "offload.optimizer": True}
    found = []
    for name, saves in (("none", {}), ("all", changes)):
        _, folder = train("ppo", tmp_path / name, [*chosen, *(f"{each}={as_typed(saves[each])}" for each in saves)])
        found.append(load_file(folder / "model.safetensors"))
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=0, atol=1e-6)


def test_a_run_has_the_settings_with_which_it_fits(tmp_path, capsys):
    make, chosen = RUNS["openvla_oft"]
    chosen = ["policy=openvla_oft", f"policy.checkpoint={make(tmp_path / 'checkpoint')}", *chosen]
    train("ppo", tmp_path / "run", [*chosen, "gpu=0.043gb", "update.minibatch_size=3"])
    settings = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert settings.gpu == "0.043gb"
    assert settings["update"].micro_batch_size == 1
    assert settings.policy.gradient_checkpointing
    assert settings.offload.optimizer
    assert "the updates are the same" in capsys.readouterr().out
