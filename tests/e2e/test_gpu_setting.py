"""``gpu=`` changes no update where only what saves memory is changed, on real Meta-World with tiny weights."""

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from openvla_checkpoint import make_checkpoint as make_openvla
from pi0_checkpoint import make_checkpoint as make_pi0
from running import train
from safetensors.torch import load_file

from vla_policies.tiny import make_tiny

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
FLOW = ["policy.num_steps=2", "policy.num_action_chunks=2"]
ADAM = ["optim.lr=1e-4", "optim.eps=1e-5"]  # a bias of keys has no gradient: its rounding must not be divided by itself
RUNS = {  # how the checkpoint is made, settings, a size that it just fits
    "openvla_oft": (make_openvla, ["policy.layout=official", "policy.num_action_chunks=2"], "0.043gb"),
    "pi0": (lambda folder: make_pi0(folder, "pi0_tiny"), ["policy.config_name=pi0_metaworld", *FLOW], "0.00465gb"),
    "smolvla": (lambda folder: make_tiny("smolvla_metaworld", folder), FLOW, "0.0069gb"),
}


@pytest.fixture(autouse=True)
def hydra():
    yield
    GlobalHydra.instance().clear()


@pytest.mark.parametrize("family", RUNS)
def test_what_saves_memory_changes_no_update(family, tmp_path, capsys):
    make, chosen, size = RUNS[family]
    chosen = [f"policy={family}", f"policy.checkpoint={make(tmp_path / 'checkpoint')}", "iterations=3", *chosen]
    found = []
    for gpu in ("null", size):
        _, folder = train("ppo", tmp_path / gpu, [*chosen, f"gpu={gpu}", "update.minibatch_size=3", *ADAM])
        found.append(load_file(folder / "model.safetensors"))
    settings = OmegaConf.load(tmp_path / size / "config.yaml")
    assert settings.gpu == size
    assert settings["update"].micro_batch_size == 1
    assert settings.policy.gradient_checkpointing
    assert settings.policy.get("prefix_cache_gb", 0.0) == 0.0
    assert settings.offload.optimizer
    assert "the updates are the same" in capsys.readouterr().out
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=0, atol=1e-6)
