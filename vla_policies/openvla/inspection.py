"""What an OpenVLA checkpoint is, lacks and takes of a GPU: from its small files, headers, or published sizes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_policies.checkpoint.lora import ADAPTER
from vla_policies.checkpoint.report import NOT_SAID, Report, describe_weights
from vla_policies.checkpoint.weights import load_weights
from vla_policies.memory import PROMPT_LENGTH, DecisionMemory, Stack
from vla_policies.nn.dino_siglip import VisionConfig
from vla_policies.openvla.checkpoint import OpenVLACheckpoint, Prompts
from vla_policies.openvla.config import OpenVLAConfig, OpenVLAOFTConfig, pixels_of
from vla_policies.openvla.model import Prismatic, PrismaticConfig
from vla_policies.processing.normalization import ACTION, KINDS

ACTION_DIM, PROPRIO_DIM = 7, 8  # of the published checkpoints, RoboTwin's and ALOHA's aside


def describe_checkpoint(folder: Path) -> Report:
    """Describe a local folder, and list what it lacks."""
    checkpoint, report = OpenVLACheckpoint.read(folder), Report()
    options = checkpoint.options
    facts = report.facts
    doubt = "" if checkpoint.family_is_known else ", or openvla_oft with the token head: published files do not say"
    facts["family"] = checkpoint.family + doubt
    facts["benchmark"] = options.get("benchmark", f"{NOT_SAID}; set benchmark")
    facts["head"] = head = options.get("head", "l1" if checkpoint.action_head else "tokens")
    if checkpoint.family == "openvla_oft":
        layout = "official" if head == "l1" else f"{NOT_SAID}; set layout to 'official' or 'rlinf'"
        facts["layout"] = options.get("layout", layout)
        for name, option in (("chunk", "num_action_chunks"), ("images", "num_images_in_input")):
            facts[name] = str(options.get(option, f"{NOT_SAID}; set {option}"))
    else:
        facts |= {"layout": "one token after the other", "chunk": "1", "images": "1"}
    facts["pixels"] = _pixels(checkpoint, options.get("layout", "official" if head == "l1" else None))
    facts["statistics"] = _statistics(checkpoint)
    facts["proprioception"] = checkpoint.proprio_projector.name if checkpoint.proprio_projector else "no"
    facts["FiLM"] = checkpoint.film.name if checkpoint.film else "no"
    facts["LoRA adapter"] = f"{ADAPTER}/" if (folder / ADAPTER / "adapter_config.json").is_file() else "no"
    if not checkpoint.statistics:
        report.missing.append("statistics: put dataset_statistics.json of the training data into the folder")
    try:
        Prompts(folder, max_length=1)
        facts["tokenizer"] = "yes"
    except (FileNotFoundError, ValueError) as error:
        report.missing.append(f"tokenizer: {error}")
    if options.get("head") == "l1" and not checkpoint.action_head:
        report.missing.append("action head: copy action_head--*.pt of the original checkpoint")
    if options.get("use_proprio") and not checkpoint.proprio_projector:
        report.missing.append("proprioception: copy proprio_projector--*.pt of the original checkpoint")
    try:
        facts["weights"] = describe_weights(checkpoint.weights)
        facts["value head"] = "in the weights" if checkpoint.value_head_in_weights else "no: a new one is initialised"
        model, entries = checkpoint.empty_model()
        load_weights(model, entries, unused=model.unused, what=str(folder), check=True)
    except (FileNotFoundError, ValueError) as error:
        report.missing.append(f"weights: {error}")
    return report


def _pixels(folder: OpenVLACheckpoint, layout: str | None) -> str:
    if folder.options or layout:
        return _in_words(folder.options or pixels_of(layout or ""))
    return f"{_in_words({})}; with layout='official' {_in_words(pixels_of('official'))}"


def _in_words(settings: Mapping[str, Any]) -> str:
    resize = settings.get("image_resize", OpenVLAConfig.image_resize)
    crop = settings.get("center_crop", OpenVLAConfig.center_crop)
    jpeg = " after a JPEG round trip" if resize == "lanczos3" else ""
    return f"{resize}{jpeg}, {'the central 0.9 of the area' if crop else 'not cropped'}"


def _statistics(folder: OpenVLACheckpoint) -> str:
    texts = []
    for key, entry in sorted(folder.statistics.items()):
        action = entry.get(ACTION, {})
        kinds = [kind for kind, names in KINDS.items() if all(name in action for name in names)]
        size = len(action[KINDS[kinds[0]][0]]) if kinds else 0
        texts.append(f"{key} ({size} action dimensions, {' or '.join(kinds)})")
    return ", ".join(texts) or "none"


def make_meta_model(
    folder: Path | None, settings: Mapping[str, Any]
) -> tuple[Prismatic, OpenVLACheckpoint | None, dict[str, Any]]:
    """See :meth:`vla_policies.pretrained.PretrainedPolicy.meta_model`; ``unnorm_key`` chooses statistics.

    The published sizes are those of arXiv 2406.09246 and ``config.json`` of openvla/openvla-7b.
    """
    said: dict[str, Any] = {"action_dim": ACTION_DIM, "proprio_dim": PROPRIO_DIM}
    if folder is None:
        film = PrismaticConfig(VisionConfig()).language.hidden_size if settings.get("use_film") else None
        parts = (VisionConfig.featurizer, VisionConfig.fused_featurizer)
        vision = VisionConfig(*(replace(part, film_dim=film) for part in parts))
        with torch.device("meta"):
            return Prismatic(PrismaticConfig(vision)), None, said
    checkpoint = OpenVLACheckpoint.read(folder)
    said["head"] = "l1" if checkpoint.action_head else "tokens"
    said["use_proprio"] = checkpoint.proprio_projector is not None
    statistics = checkpoint.statistics.get(settings.get("unnorm_key") or next(iter(checkpoint.statistics), ""), {})
    for name, part in (("action_dim", "action"), ("proprio_dim", "proprio")):
        entry = statistics.get(part, {})
        if size := len(entry.get("q01", entry.get("min", ()))):
            said[name] = size
    said |= {name: value for name, value in checkpoint.options.items() if value is not None}
    return checkpoint.empty_model()[0], checkpoint, said


def decision_memory(model: Prismatic, config: OpenVLAConfig, action_dim: int) -> DecisionMemory:
    """Return the stacks of a decision, DINOv2, SigLIP and Llama, and its cache of tokens that are decoded in turn."""
    parallel, images, vision = isinstance(config, OpenVLAOFTConfig), config.num_images_in_input, model.vision_backbone
    film = vision.featurizer.config.film_dim

    def see(block: Callable[..., Any], hidden: Tensor) -> Any:
        return block(hidden, None if film is None else hidden.new_zeros(images, film))

    stacks = []
    for part in (vision.featurizer, vision.fused_featurizer):
        sizes = part.config
        tokens = sizes.num_patches + (0 if sizes.registers is None else 1 + sizes.registers)
        stacks.append(Stack(part.blocks[0], len(part.blocks), tokens, sizes.dim, see, rows=images))
    language, layers = model.config.language, model.language_model.model.layers
    before = 1 + images * vision.config.num_patches + config.use_proprio + PROMPT_LENGTH
    length = before + action_dim * config.num_action_chunks

    def read(block: Callable[..., Any], hidden: Tensor) -> Any:
        rotation = 2 * (hidden.new_zeros(1, length, language.head_dim),)
        return block(hidden, position_embeddings=rotation, attention_mask=None, is_causal=not parallel)

    stacks.append(Stack(layers[0], len(layers), length, language.hidden_size, read))
    numbers = 2 * language.num_hidden_layers * language.num_key_value_heads * language.head_dim * length
    return DecisionMemory(stacks, cache=0 if parallel else numbers * model.language_model.lm_head.weight.element_size())
