"""Frames are stored as the model sees them: the same bits in the update, nothing stale, no more than was observed."""

import pytest
import torch
from closeness import assert_near, through
from openvla_checkpoint import act
from openvla_checkpoint import make_checkpoint as make_openvla
from pi0_checkpoint import make_checkpoint as make_pi0
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torchrl.envs.utils import ExplorationType

from vla_algos.demonstrations import record_demonstrations
from vla_common import keys
from vla_envs import Episode, make_spec
from vla_policies import OpenVLA, OpenVLAOFT, Pi0
from vla_policies.processing.images import center_crop, resize_exact, resize_lanczos3, resize_with_pad
from vla_policies.processing.jpeg import jpeg_round_trip

CAMERAS = (keys.IMAGES, keys.WRIST_IMAGES)
TEXTS = ("pick up the green cup", "put the cup in the box")
SIZES = {"larger": (240, 320), "the same": (224, 224), "smaller": (32, 48), "thin": (100, 300), "flat": (448, 112)}
KINDS = ("openvla", "openvla cropped", "oft with a wrist", "pi0", "pi0 with a wrist", "pi05")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "openvla": make_openvla(root / "openvla"),
        **{name: make_pi0(root / name, f"{name}_tiny") for name in ("pi0", "pi05")},
    }


@pytest.fixture(params=KINDS)
def policy(request, folders):
    torch.manual_seed(0)
    kind = request.param
    if kind == "oft with a wrist":
        return OpenVLAOFT.from_pretrained(
            folders["openvla"], benchmark="libero", layout="official", num_images_in_input=2, num_action_chunks=2
        )
    if kind.startswith("openvla"):
        return OpenVLA.from_pretrained(folders["openvla"], benchmark="libero", center_crop=kind.endswith("cropped"))
    images = 2 if kind.endswith("wrist") else 1
    name = kind.split()[0]
    return Pi0.from_pretrained(
        folders[name],
        benchmark="libero",
        config_name=f"{name}_libero",
        num_images_in_input=images,
        train_expert_only=False,
    )


def observe(size, wrist_size=None, seed=0):
    """Observations of LIBERO with cameras of these sizes."""
    generator = torch.Generator().manual_seed(seed)

    def frames(*shape):
        return torch.randint(0, 256, (2, *shape, 3), dtype=torch.uint8, generator=generator)

    entries = {
        keys.IMAGES: frames(*size),
        keys.WRIST_IMAGES: frames(1, *(wrist_size or size)),
        keys.STATES: torch.randn(2, 8, generator=generator),
        keys.TASK_DESCRIPTIONS: NonTensorStack(*(NonTensorData(text) for text in TEXTS)),
    }
    return TensorDict(entries, batch_size=[2])


def own_resize(policy, camera):
    """What each reference does, written down once more."""
    size = policy.model_image_size
    if isinstance(policy, Pi0):
        return resize_with_pad(camera, size)
    if policy.config.image_resize == "lanczos3":
        camera = resize_lanczos3(jpeg_round_trip(camera), size)
    else:
        camera = resize_exact(camera, size)
    return center_crop(camera) if policy.config.center_crop else camera


def learned(policy, td):
    """Everything that an update computes of a batch, with the gradients."""
    policy.zero_grad()
    log_prob, entropy, value = policy.evaluate_actions(td)
    (log_prob.sum() + entropy.sum() + value.sum()).backward()
    torch.manual_seed(5)
    cloned = policy.imitation_loss(td, 0.1)
    gradients = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    chosen = td.get(policy.sample_key)
    return [log_prob, entropy, value, cloned, policy.get_dist(td).log_prob(chosen), *gradients]


@pytest.mark.parametrize("name", ["larger", "smaller", "flat"])
def test_the_update_sees_the_same_bits_in_what_was_stored(policy, name):
    observed = observe(SIZES[name])
    acted = act(policy, observed.clone(), ExplorationType.RANDOM)
    stored = acted.select(*policy.loss_keys, keys.ACTION)
    assert keys.IMAGES not in stored
    assert keys.WRIST_IMAGES not in stored
    plain = stored.exclude(keys.MODEL_IMAGES).update(observed.select(*CAMERAS))
    for found, expected in zip(learned(policy, stored), learned(policy, plain), strict=True):
        assert torch.equal(found, expected)
    cameras = [observed[keys.IMAGES], observed[keys.WRIST_IMAGES][:, 0]][: stored[keys.MODEL_IMAGES].shape[1]]
    seen = torch.stack([own_resize(policy, camera) for camera in cameras], dim=1)
    assert torch.equal(policy.model_images(stored), seen)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_never_more_is_stored_than_was_observed(policy, size):
    observed = observe(size)
    stored = act(policy, observed.clone(), ExplorationType.RANDOM)[keys.MODEL_IMAGES]
    assert stored.dtype == torch.uint8
    height, width = policy.model_image_size
    pixels = stored.shape[2] * stored.shape[3]
    assert pixels == min(size[0] * size[1], height * width)
    if pixels < height * width:
        assert torch.equal(stored[:, 0], observed[keys.IMAGES])


def test_cameras_of_two_sizes_are_resized(policy):
    stored = act(policy, observe((240, 320), (84, 84)), ExplorationType.RANDOM).select(*policy.loss_keys)
    assert stored[keys.MODEL_IMAGES].shape[2:4] == policy.model_image_size
    policy.evaluate_actions(stored)


def test_a_second_decision_is_about_what_is_observed_then(policy):
    """The entry of the decision before is still there, as in a loop that reuses its TensorDict."""
    first, second = observe((240, 320)), observe((240, 320), seed=1)
    acted = act(policy, first, ExplorationType.DETERMINISTIC)
    expected = act(policy, second.clone(), ExplorationType.DETERMINISTIC)
    found = act(policy, acted.update(second), ExplorationType.DETERMINISTIC)
    for key in (keys.MODEL_IMAGES, keys.ACTION):
        assert torch.equal(found[key], expected[key])
    # Nor does learning read an old entry beside new cameras.
    changed = found.clone().update(observe((240, 320), seed=2).select(*CAMERAS))
    assert not torch.equal(policy.evaluate_actions(changed)[0], policy.evaluate_actions(found)[0])


def test_acting_leaves_the_cameras_alone(policy):
    observed = observe((240, 320))
    acted = act(policy, observed.clone(), ExplorationType.RANDOM)
    for key in CAMERAS:
        assert torch.equal(acted[key], observed[key])


def test_the_kept_prefix_is_that_of_the_stored_frames(folders):
    torch.manual_seed(0)
    policy = Pi0.from_pretrained(folders["pi0"], benchmark="libero", config_name="pi0_libero", num_images_in_input=2)
    observed = observe((240, 320))
    stored = act(policy, observed.clone(), ExplorationType.RANDOM).select(*policy.loss_keys)
    plain = stored.exclude(keys.MODEL_IMAGES).update(observed.select(*CAMERAS))
    kept, anew = policy.precompute(stored.clone()), policy.precompute(plain)
    for key in (keys.PREFIX_KEYS, keys.PREFIX_VALUES, keys.PREFIX_VALID):
        assert torch.equal(kept[key], anew[key])
    for found, expected in zip(policy.evaluate_actions(kept), policy.evaluate_actions(stored), strict=True):
        assert_near(found, expected, through(policy))


class Recorder:
    """Stands in for an environment whose workers record demonstrations."""

    def __init__(self, *recordings):
        self.recordings, self.pool = recordings, self
        self.simulator_spec = make_spec("metaworld/reach-v3")  # one with an expert

    def map(self, function, items, *, on_result, **settings):
        for visit, recording in zip(items, self.recordings, strict=True):
            on_result((visit.number, recording))


def demonstration(images, chunk_size, action_dim):
    decisions = len(images)
    return {
        keys.IMAGES: images.numpy().copy(),
        keys.STATES: torch.zeros(decisions, 8).numpy(),
        keys.TASK_DESCRIPTIONS: TEXTS[0],
        keys.ACTION: torch.zeros(decisions, chunk_size, action_dim).numpy(),
        keys.STEP_MASK: torch.ones(decisions, chunk_size, dtype=torch.bool).numpy(),
        keys.STEP: torch.arange(decisions).numpy(),
        keys.EPISODE_LEN: decisions,
        keys.FINAL_STATES: torch.zeros(8).numpy(),
    }


def test_demonstrations_are_kept_as_the_policy_sees_them(folders):
    torch.manual_seed(0)
    policy = OpenVLA.from_pretrained(folders["openvla"], benchmark="libero")
    images = observe((240, 320))[keys.IMAGES]
    env = Recorder(demonstration(images, 1, 7), None, demonstration(images[:1], 1, 7))
    solved = []
    episodes = [Episode(0, trial) for trial in range(3)]
    samples = record_demonstrations(env, policy, episodes, on_episode=lambda episode, steps: solved.append(steps))
    assert solved == [2, None, 1]
    assert keys.IMAGES not in samples
    assert samples[keys.MODEL_IMAGES].shape == (3, 1, 224, 224, 3)
    plain = samples.exclude(keys.MODEL_IMAGES).set(keys.IMAGES, torch.cat([images, images[:1]]))
    assert torch.equal(policy.imitation_loss(samples, 0.1), policy.imitation_loss(plain, 0.1))
