"""OpenVLA-OFT, pi0 and pi0.5 on CALVIN: states, actions, gripper, cameras and prompts as their data sets have them.

Facts, by hand: calvin_env (``robot_obs``, relative actions, gripper 1 opens and -1 closes), openpi (normalisation,
padding, prompts), RLinf at a3816b596 (``calvin_policy.py``, ``calvin_dataconfig.py``, ``prepare_actions_for_calvin``).
"""

import json

import numpy as np
import pytest
import torch
from openvla_checkpoint import make_checkpoint as make_openvla
from pi0_checkpoint import make_checkpoint
from PIL import Image
from sentencepiece import SentencePieceProcessor

from vla_common import keys
from vla_envs import make_spec
from vla_policies import OpenVLAOFT, Pi0, make_example
from vla_policies.registry import make_policy

VARIANTS = {"pi0_calvin": "pi0_tiny", "pi05_calvin": "pi05_tiny"}
DATA_SET = "InternRobotics/InternData-Calvin_ABC"  # openpi's asset id is the data set's
STATISTICS = {
    "mean": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.05],
    "std": [1.0, 2.0, 4.0, 0.5, 0.25, 0.1, 0.02],
    "q01": [-1.0, -2.0, -1.0, 0.0, -0.5, -0.1, 0.0],
    "q99": [1.0, 2.0, 3.0, 1.0, 0.5, 0.3, 0.08],
}
# robot_obs: hand position (m), its Euler angles (rad), opening (m), then seven joints and the last command.
ROBOT_OBS = [0.5, -0.3, 0.6, 0.3, 0.4, 0.1, 0.08]


@pytest.fixture(scope="module", params=VARIANTS)
def config_name(request):
    return request.param


@pytest.fixture(scope="module")
def folder(config_name, tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp(config_name), VARIANTS[config_name], horizon=5)
    (folder / "assets" / DATA_SET).parent.mkdir()
    (folder / "assets" / "tiny").rename(folder / "assets" / DATA_SET)
    entries = {"norm_stats": {"state": STATISTICS, "actions": STATISTICS}}
    (folder / "assets" / DATA_SET / "norm_stats.json").write_text(json.dumps(entries))
    return folder


@pytest.fixture(scope="module")
def pi(config_name, folder):
    return Pi0.from_pretrained(folder, benchmark="calvin", config_name=config_name, num_images_in_input=2)


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected), atol=2e-5, rtol=2e-5)


def test_pi_normalises_seven_numbers_of_the_state(pi, config_name):
    assert (pi.statistics.key, pi.state_dim, pi.horizon) == (DATA_SET, 7, 5)
    expected = {
        "pi0_calvin": [0.5, -0.2, 0.1, 0.0, 0.0, -4.0, 0.03 / 0.020001],  # (x - mean) / (std + 1e-6)
        "pi05_calvin": [0.5, -0.15, -0.2, -0.4, 0.8, 0.0, 1.0],  # 2 (x - q01) / (q99 - q01) - 1
    }[config_name]
    observed = make_example("calvin", 1)
    observed[keys.STATES] = torch.tensor([ROBOT_OBS])
    close(pi.statistics.normalize("state", pi.adapter.states(observed))[0], expected)


def test_pis_actions_are_used_as_they_are_but_for_the_gripper(pi, config_name):
    models = torch.tensor([[[0.5, 0.5, -0.5, 0.5, -0.5, 0.5, gripper] for gripper in (1.0, -3.0)]])
    moves = {
        "pi0_calvin": [0.5, 1.1, -1.8, 0.55, 0.275, 0.55],  # x std + mean
        "pi05_calvin": [0.5, 1.0, 0.0, 0.75, -0.25, 0.2],  # (x + 1) / 2 (q99 - q01) + q01
    }[config_name]
    for states in (torch.zeros(1, 7), torch.tensor([ROBOT_OBS])):  # nothing is relative to them
        found = pi.to_simulator(models, states)[0]
        close(found, [[*moves, 1.0], [*moves, -1.0]])
    assert not pi.preset.relative


@pytest.mark.parametrize(("gripper", "command"), [(2.0, 1), (1e-4, 1), (0.0, -1), (-1e-4, -1), (-2.0, -1)])
def test_the_gripper_is_a_sign_and_not_inverted(gripper, command, pi):
    """calvin_env asserts 1 or -1; 0, which NumPy's sign gives RLinf's pi0, closes here as in RLinf's OpenVLA-OFT."""
    action = torch.zeros(1, 1, 7)
    action[..., 6] = gripper
    assert pi.adapter.to_simulator(action)[0, 0, 6] == command


def test_pi_sees_the_static_camera_then_the_hands_without_padding(pi):
    observed = make_example("calvin", 2)
    cameras = [observed[keys.IMAGES], observed[keys.WRIST_IMAGES][:, 0]]
    assert [camera.shape[1:3] for camera in cameras] == [(200, 200), (84, 84)]
    size = pi.model_image_size[0]
    seen = pi.model_images(observed)
    assert seen.shape == (2, 2, size, size, 3)
    for number, camera in enumerate(cameras):  # openpi's resize_with_pad of a square image: no black rows or columns
        expected = Image.fromarray(camera[0].numpy()).resize((size, size), Image.Resampling.BILINEAR)
        assert np.array_equal(seen[0, number].numpy(), np.asarray(expected))


def test_the_sizes_of_a_224_pixel_model_are_square_after_openpis_arithmetic():
    assert [int(side / (side / 224)) for side in (200, 84)] == [224, 224]


def test_pis_prompts_are_the_sentence_alone(pi, folder):
    """pi0.5 has ``discrete_state_input=False``: nothing about the state, and the line break by itself."""
    sentence = "push the handle to open the drawer"
    tokens = pi.prompt_tokens([sentence], torch.randn(1, 7))[0]
    reference = SentencePieceProcessor(model_file=str(folder / "paligemma_tokenizer.model"))
    expected = [2, *reference.encode(sentence), *reference.encode("\n")]
    assert tokens[: len(expected)].tolist() == expected
    assert not tokens[len(expected) :].any()


@torch.no_grad()
def test_only_pi0_reads_the_state(pi, config_name):
    noisy, time = torch.randn(1, 5, pi.model_action_dim), torch.full((1,), 0.5)
    found = []
    for state in (torch.zeros(1, 7), torch.tensor([ROBOT_OBS])):
        observed = make_example("calvin", 1)
        observed[keys.STATES] = state
        found.append(pi.velocity(pi.observe(pi.write_prompt(observed).set(keys.STATES, state)), noisy, time)[0])
    assert torch.equal(*found) == (config_name == "pi05_calvin")


@pytest.mark.parametrize("suite", ["lh-mtlc", "D", "ABC", "ABCD"])
def test_every_sentence_of_a_chain_fits_the_prompt(suite, folder, config_name):
    spec = make_spec(f"calvin/{suite}")
    assert len({text for task in spec.tasks for text in task.instructions}) >= 34
    make_policy(spec, family="pi0", checkpoint=folder, config_name=config_name, num_images_in_input=2)
    with pytest.raises(ValueError, match="max_prompt_length=5: the prompt of"):
        make_policy(spec, family="pi0", checkpoint=folder, config_name=config_name, max_prompt_length=5)


# ---- OpenVLA-OFT


@pytest.fixture(scope="module")
def oft(tmp_path_factory):
    folder = make_openvla(tmp_path_factory.mktemp("oft"))
    action = {name: STATISTICS[name] for name in ("q01", "q99")} | {"mask": [True] * 6 + [False]}
    (folder / "dataset_statistics.json").write_text(json.dumps({"calvin_abc": {"action": action}}))
    settings = {"layout": "rlinf", "unnorm_key": "calvin_abc", "num_action_chunks": 1, "use_proprio": False}
    return OpenVLAOFT.from_pretrained(folder, benchmark="calvin", num_images_in_input=1, **settings)


def test_opened_closed_and_the_middle_of_oft(oft):
    """Tokens 31744 (0.99608), 31999 (-0.99608) and 31872, whose centre is 0: RLinf's ``> 0`` closes then."""
    tokens = torch.tensor([[[128] * 6 + [gripper]] for gripper in (0, 255, 128)])
    found = oft.to_simulator(oft.tokens.decode(tokens))
    middle = [0.0, 0.0, 1.0, 0.5, 0.0, 0.1]  # of q01 and q99
    close(found[:, 0], [[*middle, 1.0], [*middle, -1.0], [*middle, -1.0]])
    last = oft.to_simulator(oft.tokens.decode(torch.zeros(1, 1, 7, dtype=torch.int64)))[0, 0]
    close(last[:3], [0.99608, 1.99216, 2.99216])  # (0.99608 + 1) / 2 (q99 - q01) + q01
