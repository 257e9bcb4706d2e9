"""LeRobot loads what is saved here and acts as we do: its actions, recorded by tests/cross/lerobot_actions.py."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from lerobot_checkpoint import GOLDEN, golden, save_trained
from openvla_checkpoint import act
from paths import ROOT
from tensordict import NonTensorData, NonTensorStack
from torchrl.envs.utils import ExplorationType

from vla_common import keys
from vla_policies import make_example
from vla_policies.processing.prompts import list_states

CROSS = ROOT / "tests" / "cross" / "lerobot_actions.py"
SPEC = importlib.util.spec_from_file_location("lerobot_actions", CROSS)
cross = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cross)
SAID = json.loads(CROSS.with_suffix(".json").read_text())


@torch.no_grad()
@pytest.mark.parametrize("kind", cross.KINDS)
def test_lerobot_loads_what_is_saved_and_acts_the_same(kind, tmp_path, monkeypatch):
    policy = save_trained(tmp_path / kind, kind)
    assert cross.digests(tmp_path / kind) == SAID[kind]  # these files it was that LeRobot loaded
    of = GOLDEN / f"lerobot_{kind}_tiny"
    recorded, td = golden(of), make_example("libero", 2)
    td[keys.IMAGES], td[keys.WRIST_IMAGES] = recorded["image_u8"], recorded["image2_u8"].unsqueeze(1)
    td[keys.STATES] = recorded["state"]
    texts = json.loads((of / "golden.json").read_text())["instructions"]
    td.set(keys.TASK_DESCRIPTIONS, NonTensorStack(*map(NonTensorData, texts)))
    with np.load(cross.RECORDED) as stored:
        tokens, actions = (torch.from_numpy(stored[f"{kind}_{name}"]) for name in ("tokens", "actions"))
    monkeypatch.setattr(torch, "randn", lambda *shape, **named: recorded["noise"])
    found = act(policy, td, ExplorationType.RANDOM)
    assert torch.equal(found[keys.PROMPT_TOKENS][:, : tokens.shape[1]], tokens)
    torch.testing.assert_close(found[keys.ACTION], actions[:, :3], rtol=0, atol=1e-5)


def test_prompts_of_pi05_are_lerobots():
    texts, states = cross.PROMPTED
    assert list_states(texts, torch.tensor(states)) == SAID["prompts"]
