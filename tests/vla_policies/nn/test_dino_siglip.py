"""The vision backbone and the image preprocessing of OpenVLA against the reference's numbers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import assert_near, through
from paths import GOLDEN
from safetensors.torch import load_file
from torch.testing import assert_close

from vla_policies.nn.dino_siglip import PREFIX, DualVisionBackbone, TransformerConfig, VisionConfig, heads_of
from vla_policies.processing import jpeg
from vla_policies.processing.images import (
    ImagePreprocessor,
    center_crop,
    normalize,
    resize_exact,
    resize_lanczos3,
)
from vla_policies.processing.jpeg import jpeg_round_trip

TINY = GOLDEN / "openvla_tiny"
STEP = 7  # the stored pixels are every seventh row and column
SMALL = VisionConfig(
    TransformerConfig(8, 3, 2, 16, registers=4, layer_scale=True, num_patches=4),
    TransformerConfig(8, 3, 2, 16, num_patches=4),
)


@pytest.fixture(scope="module")
def golden():
    with np.load(TINY / "golden_io.npz") as stored:
        return {name: torch.from_numpy(stored[name]) for name in stored.files}


@pytest.fixture(scope="module")
def weights():
    return {name: tensor.float() for name, tensor in load_file(TINY / "model.safetensors").items()}


@pytest.fixture(scope="module")
def preprocessor():
    return ImagePreprocessor.from_config(json.loads((TINY / "preprocessor_config.json").read_text()))


@pytest.fixture
def backbone(weights):
    config = VisionConfig.from_shapes(shapes_of(weights), heads_of(json.loads((TINY / "config.json").read_text())))
    backbone = DualVisionBackbone(config)
    used = {name for name in weights if name.startswith(PREFIX) and not config.unused(name)}
    backbone.load_state_dict({name.removeprefix(PREFIX): weights[name] for name in used}, strict=True)
    return backbone


def pixels_of(preprocessor, images):
    """What the vision backbone sees of cameras, or of images ``[N, n, H, W, 3]``."""
    cameras = images.unbind(1) if isinstance(images, torch.Tensor) else images
    return preprocessor.normalize(preprocessor.resize(cameras))


def shapes_of(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def random_images(*shape):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (*shape, 3), dtype=torch.uint8, generator=generator)
    images[-1] = (images[-1] > 127) * 255  # full contrast: the cubic overshoots and has to be clipped
    return images


# Pixels.


def test_pixel_values_equal_the_reference(golden, preprocessor):
    pixels = pixels_of(preprocessor, golden["images"].unsqueeze(1))
    assert pixels.shape == (2, 6, 224, 224)
    assert pixels.dtype == torch.float32
    assert torch.equal(pixels[:, :, ::STEP, ::STEP], golden["pixel_values_strided"])
    assert_close(pixels.mean((2, 3)), golden["pixel_values_mean"], atol=1e-6, rtol=0)


def test_pixel_values_of_a_resized_image_equal_the_reference(golden, preprocessor):
    pixels = pixels_of(preprocessor, golden["image_256"][None, None])
    assert torch.equal(pixels[:, :, ::STEP, ::STEP], golden["pixel_values_256_strided"])


def test_each_of_several_images_has_six_channels_of_its_own(golden, preprocessor):
    images = golden["images"]
    both = pixels_of(preprocessor, images.unsqueeze(0))
    each = [pixels_of(preprocessor, image[None, None]) for image in images]
    assert torch.equal(both, torch.cat(each, dim=1))


SIZES = [(256, 256), (480, 640), (240, 320), (128, 128), (84, 96), (224, 300), (3, 5)]


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_exact_resize_equals_pillow_in_every_bit(height, width):
    """Columns first, as Pillow did alone up to version 12; version 13 begins with the rows where that is less work."""
    image_module = pytest.importorskip("PIL.Image")
    images = random_images(2, height, width)
    bicubic = image_module.Resampling.BICUBIC
    resized = [
        np.array(image_module.fromarray(image.numpy()).resize((224, height), bicubic).resize((224, 200), bicubic))
        for image in images
    ]
    assert torch.equal(resize_exact(images, (200, 224)), torch.from_numpy(np.stack(resized)))


FRAMES = ("libero", "libero_wrist", "libero_128", "metaworld_480x640", "odd_97x97")


@pytest.fixture(scope="module")
def tensorflow():
    """Frames of the simulators, and what TensorFlow 2.21.0 (CPU) makes of them, by steps of openvla-oft's evaluation.

    ``jpeg``: ``tf.io.decode_image(tf.io.encode_jpeg(frame), expand_animations=False)``; ``lanczos3``: its
    ``tf.image.resize(..., (224, 224), "lanczos3", antialias=True)``, rounded and clipped; ``crop``: of that, the
    central box of side ``sqrt(0.9)`` by ``tf.image.crop_and_resize``, between two ``tf.image.convert_image_dtype``.
    Of ``jpeg`` every fifth row and column is kept, of the others every third.
    """
    with np.load(GOLDEN / "tensorflow_pixels.npz") as stored:
        return {name: torch.from_numpy(stored[name]) for name in stored.files if "/" in name}


@pytest.mark.parametrize("frame", FRAMES)
def test_a_jpeg_round_trip_equals_tensorflow_in_every_bit(tensorflow, frame):
    images = tensorflow[f"frame/{frame}"].unsqueeze(0)
    assert torch.equal(jpeg_round_trip(images)[0, ::5, ::5], tensorflow[f"jpeg/{frame}"])
    pair = torch.cat([images.flip(1), images])
    assert torch.equal(jpeg_round_trip(pair)[1], jpeg_round_trip(images)[0])
    assert torch.equal(jpeg._round_trip(pair), jpeg_round_trip(pair))  # the batch whole, as on a GPU


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("crop", [False, True])
def test_pixels_of_openvla_oft_equal_tensorflow_within_one_level(tensorflow, frame, crop):
    images = [tensorflow[f"frame/{frame}"][None]]
    seen = ImagePreprocessor(resize_method="lanczos3", crop=crop).resize(images)[0, 0, ::3, ::3].int()
    difference = (seen - tensorflow[f"{'crop' if crop else 'lanczos3'}/{frame}"].int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 5e-4
    bicubic = ImagePreprocessor(crop=crop).resize(images)[0, 0, ::3, ::3].int()
    assert (bicubic - seen).abs().float().mean() > 0.5  # other pixels


def test_cameras_of_different_sizes_are_each_resized_from_what_they_saw(tensorflow):
    cameras = [tensorflow[f"frame/{name}"].unsqueeze(0) for name in ("libero", "libero_128")]
    preprocessor = ImagePreprocessor(resize_method="lanczos3", crop=True)
    seen = preprocessor.resize(cameras)
    assert seen.shape == (1, 2, 224, 224, 3)
    for number, camera in enumerate(cameras):
        assert torch.equal(seen[:, number], preprocessor.resize([camera])[:, 0])
    assert pixels_of(preprocessor, cameras).shape == (1, 12, 224, 224)


@pytest.mark.parametrize("resize", [resize_exact, resize_lanczos3])
def test_an_image_of_the_right_size_is_not_touched(resize):
    images = random_images(2, 224, 224)
    assert torch.equal(resize(images, (224, 224)), images)


def test_centre_crop_follows_its_formula():
    images = random_images(1, 40, 50)
    side, (height, width) = np.sqrt(0.9), (40, 50)
    source = images[0].double().numpy() / 255
    expected = np.empty((height, width, 3))
    for i in range(height):
        for j in range(width):
            y = 39 * ((1 - side) / 2 + i * side / (height - 1))
            x = 49 * ((1 - side) / 2 + j * side / (width - 1))
            top, left = int(y), int(x)
            box = source[top : top + 2, left : left + 2]
            rows = box[0] + (box[1] - box[0]) * (y - top)
            expected[i, j] = rows[0] + (rows[1] - rows[0]) * (x - left)
    cropped = center_crop(images)[0].int().numpy()
    difference = np.abs(cropped - np.floor(expected * 255.5))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3


def test_centre_crop_of_one_colour_changes_nothing():
    levels = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 8, 8, 3)
    assert torch.equal(center_crop(levels), levels)


def test_the_options_of_the_preprocessor_do_something(golden):
    image = golden["image_256"][None, None]
    plain = pixels_of(ImagePreprocessor(), image)
    for option in ({"crop": True}, {"resize_method": "lanczos3"}):
        changed = pixels_of(ImagePreprocessor(**option), image)
        assert changed.shape == plain.shape
        assert not torch.equal(changed, plain)


def test_unusable_images_and_preprocessors_are_refused(preprocessor):
    images = random_images(2, 8, 8)
    with pytest.raises(ValueError, match=r"expected torch.uint8 RGB \[N, H, W, 3\]"):
        pixels_of(preprocessor, images)
    for refuse in (resize_exact, resize_lanczos3):
        with pytest.raises(ValueError, match=r"torch.float32 .* expected torch.uint8 RGB \[N, H, W, 3\]"):
            refuse(images.float(), (224, 224))
    with pytest.raises(ValueError, match=r"expected torch.uint8 RGB"):
        normalize(images.permute(0, 3, 1, 2), preprocessor.means[0], preprocessor.stds[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"means": None}, "has no .'means'."),
        ({"image_resize_strategy": "letterbox"}, "'letterbox'"),
        ({"interpolations": ["bilinear", "bilinear"]}, "bilinear"),
        ({"input_sizes": [[3, 224, 224], [3, 384, 384]]}, "of one size"),
        ({"input_sizes": [[3, 224, 224]]}, "1 inputs"),
        ({"means": [[0.5, 0.5, float("nan")], [0.5, 0.5, 0.5]]}, "must be a list of finite numbers"),
        ({"means": "ab"}, "must be a list of finite numbers"),
        ({"stds": [[0.5, 0.5, 0.0], [0.5, 0.5, 0.5]]}, "stds above 0"),
        ({"stds": [[0.5, 0.5], [0.5, 0.5, 0.5]]}, "three of each"),
    ],
)
def test_a_preprocessor_config_of_another_model_is_refused(change, message):
    config = json.loads((TINY / "preprocessor_config.json").read_text()) | change
    with pytest.raises(ValueError, match=message):
        ImagePreprocessor.from_config({name: value for name, value in config.items() if value is not None})


# Features.


def test_vision_features_equal_the_reference(golden, backbone, preprocessor):
    with torch.no_grad():
        features = backbone(pixels_of(preprocessor, golden["images"].unsqueeze(1)))
    assert_near(features[:, ::8], golden["vision_features_strided"], through(backbone))


def test_tokens_of_several_images_follow_each_other(golden, backbone, preprocessor):
    images = golden["images"]
    with torch.no_grad():
        both = backbone(pixels_of(preprocessor, images.unsqueeze(0)))
        each = backbone(pixels_of(preprocessor, images.unsqueeze(1)))
    assert_near(both, each.flatten(0, 1).unsqueeze(0), through(backbone))


def test_gradient_checkpointing_changes_no_number():
    backbone, pixels = DualVisionBackbone(SMALL), torch.randn(2, 6, 28, 28)
    gradients = []
    for enabled in (False, True):
        backbone.featurizer.gradient_checkpointing = backbone.fused_featurizer.gradient_checkpointing = enabled
        backbone.zero_grad()
        backbone(pixels).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in backbone.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_unused_keys_are_those_without_a_gradient_in_the_reference(weights):
    norms = json.loads((TINY / "grad_norms.json").read_text())
    config = VisionConfig.from_shapes(shapes_of(weights), (4, 4))
    without = {name for name, norm in norms.items() if norm is None}
    assert {name for name in weights if config.unused(name)} == without
    assert config.unused("base_model.model." + PREFIX + "featurizer.blocks.2.attn.qkv.lora_A.weight")
    assert config.unused("base_model.model." + PREFIX + "fused_featurizer.attn_pool.mlp.fc1.lora_B.weight")
    assert not config.unused("base_model.model." + PREFIX + "featurizer.blocks.1.attn.qkv.lora_A.weight")


def test_full_size_checkpoint_has_exactly_the_parameters_that_are_built():
    shapes = json.loads((GOLDEN / "openvla_7b_full_layout.json").read_text())
    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    names = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
    config = VisionConfig.from_shapes(shapes, heads_of({"timm_model_ids": names}))
    assert config == VisionConfig()
    assert (config.dim, config.num_patches, config.image_size) == (2176, 256, 224)
    with torch.device("meta"):
        backbone = DualVisionBackbone(config)
    used = {name: shape for name, shape in shapes.items() if name.startswith(PREFIX) and not config.unused(name)}
    assert {PREFIX + name: shape for name, shape in shapes_of(backbone.state_dict()).items()} == used


def test_film_modulates_by_the_instruction_and_is_read_from_the_shapes():
    torch.manual_seed(0)
    config = VisionConfig(replace(SMALL.featurizer, film_dim=6), replace(SMALL.fused_featurizer, film_dim=6))
    backbone = DualVisionBackbone(config)
    checkpoint = {**shapes_of(backbone.state_dict())}
    for name in ("featurizer", "fused_featurizer"):  # the last block, of which only the number counts
        checkpoint[f"{name}.blocks.2.norm1.weight"] = (8,)
    assert VisionConfig.from_shapes(checkpoint, (2, 2)) == config

    pixels, language = torch.randn(2, 12, 28, 28), torch.randn(2, 6)
    features = backbone(pixels, language)
    assert features.shape == (2, 8, 16)
    other = backbone(pixels, torch.stack([language[0], -language[1]]))
    assert torch.equal(features[0], other[0])
    assert not torch.allclose(features[1], other[1])
    with pytest.raises(ValueError, match="has FiLM layers"):
        backbone(pixels)
    with pytest.raises(ValueError, match="without FiLM"):
        DualVisionBackbone(SMALL)(pixels, language)


@pytest.mark.parametrize("shape", [(1, 3, 224, 224), (1, 6, 256, 256), (6, 224, 224)])
def test_pixels_of_another_shape_are_refused(backbone, shape):
    with pytest.raises(ValueError, match=r"expected \[B, 6 \* images, 224, 224\]"):
        backbone(torch.zeros(shape))


def test_sizes_that_cannot_be_read_are_refused(weights):
    with pytest.raises(ValueError, match=r"timm_model_ids of config.json is \[\], must be two"):
        heads_of({})
    with pytest.raises(ValueError, match=r"'resnet50'\], must be two vision models of vit_small\*, "):
        heads_of({"timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "resnet50"]})
    shapes = shapes_of(weights)
    with pytest.raises(ValueError, match="5 attention heads do not divide the width 32"):
        VisionConfig.from_shapes(shapes, (5, 4))
    del shapes["vision_backbone.fused_featurizer.pos_embed"]
    with pytest.raises(ValueError, match=r"fused_featurizer.pos_embed.*not the vision backbone"):
        VisionConfig.from_shapes(shapes, (4, 4))
