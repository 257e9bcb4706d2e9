"""The policy of a recipe: loaded from a checkpoint, with LoRA adapters if asked for, or a new small one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from omegaconf import DictConfig

from vla_algos.run.config import group
from vla_common.errors import unknown_name
from vla_common.keys import WRIST_IMAGES
from vla_envs import SimulatorSpec
from vla_policies import Pi0, VLAPolicy, load_policy
from vla_policies.checkpoint.lora import add_lora, has_lora, lora_config
from vla_policies.openvla.base import PrismaticPolicy
from vla_policies.registry import POLICIES, policy_class

LargePolicy = PrismaticPolicy | Pi0
_SMALL = ("small", "small_flow")  # made new for an environment; the others are loaded
_DTYPES = ("float32", "bfloat16")
_LORA = ("lora_rank", "lora_alpha", "lora_targets")


def make_policy(config: DictConfig, spec: SimulatorSpec) -> VLAPolicy:
    """The policy of ``config.policy``, complete and known to fit an environment that has not been started.

    Raises:
        FileNotFoundError, ValueError: no such checkpoint, or settings or an environment that do not fit it.
    """
    policy = _make_policy(config, spec)
    check_policy(policy, spec)
    return policy


def _make_policy(config: DictConfig, spec: SimulatorSpec) -> VLAPolicy:
    family = config.policy.get("family")
    if family not in POLICIES:
        raise unknown_name("policy.family", str(family), POLICIES)
    policy_type = policy_class(family)
    if family in _SMALL:
        shape = {"action_low": spec.action_low, "action_high": spec.action_high, "state_dim": spec.state_dim}
        also = ["family", "checkpoint"]
        settings = group(config, "policy", policy_type.config_class, also=also, without=shape)
        del settings["family"]
        checkpoint = settings.pop("checkpoint")
        if checkpoint:
            policy = load_policy(checkpoint)
            return policy.to(_default_device()) if isinstance(policy, LargePolicy) else policy
        return policy_type(policy_type.config_class(**shape, **settings))
    also = ["family", "checkpoint", "dtype", "device", "lora_adapter", *_LORA]
    # The benchmark is the environment's.
    settings = group(config, "policy", policy_type.config_class, also=also, without=["benchmark"])
    del settings["family"]
    return _load(policy_type, settings, benchmark=spec.id.partition("/")[0])


def _load(policy_type: type[LargePolicy], settings: Mapping[str, Any], benchmark: str) -> LargePolicy:
    # What is left open is for the checkpoint, and then the library, to say.
    settings = {name: value for name, value in settings.items() if value is not None}
    checkpoint = settings.pop("checkpoint", None)
    if not checkpoint:
        raise ValueError(
            f"policy={policy_type.family} starts from a checkpoint; type policy.checkpoint=FOLDER: a folder in the "
            "published layout, or a hub id"
        )
    lora = {name: settings.pop(name, None) for name in _LORA}
    dtype = settings.pop("dtype", None)
    if dtype not in (None, *_DTYPES):
        raise unknown_name("policy.dtype", str(dtype), _DTYPES)
    dtype = None if dtype is None else getattr(torch, dtype)
    settings.setdefault("device", _default_device())
    policy = policy_type.from_pretrained(checkpoint, benchmark=benchmark, dtype=dtype, **settings)
    adapt(policy, lora["lora_rank"], lora["lora_alpha"], lora["lora_targets"])
    return policy


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def adapt(
    policy: LargePolicy, rank: int | None, alpha: int | None = None, targets: Sequence[str] | None = None
) -> None:
    """Train a LoRA adapter of this rank instead of the whole model, or go on with the one that the checkpoint has.

    Args:
        policy: changed in place.
        rank: ``None`` adds no adapter.
        alpha, targets: see :func:`vla_policies.checkpoint.lora.add_lora`; ``None`` for its defaults, or those of the
            checkpoint.

    Raises:
        ValueError: ``alpha`` or ``targets`` without ``rank``, or the checkpoint's adapter is another one.
    """
    if rank is None:
        if alpha is not None or targets is not None:
            raise ValueError("policy.lora_alpha and policy.lora_targets need policy.lora_rank; 32 is usual")
        return
    if not has_lora(policy):
        add_lora(policy, rank, alpha, targets)
        return
    found = lora_config(policy)
    layers = {name.rpartition(".")[2] for name in found.target_modules}
    if rank != found.r or alpha not in (None, found.lora_alpha) or targets is not None and set(targets) != layers:
        raise ValueError(
            f"the checkpoint has a LoRA adapter already, of rank {found.r} and alpha {found.lora_alpha} on "
            f"{sorted(layers)}; leave policy.lora_* out to go on with it"
        )


def check_policy(policy: VLAPolicy, spec: SimulatorSpec) -> None:
    """Refuse a policy that cannot act in an environment, which has not been started.

    Raises:
        ValueError: the policy has other actions, states or cameras, or cannot take one of the instructions.
    """
    benchmark = spec.id.partition("/")[0]
    if isinstance(policy, LargePolicy) and policy.config.benchmark != benchmark:
        raise ValueError(
            f"the policy acts in {policy.config.benchmark} and {spec.id} is of {benchmark}; take env=... of "
            f"{policy.config.benchmark}, or load the checkpoint for {benchmark}: policy={policy.family}"
        )
    if (policy.action_dim, policy.state_dim) != (spec.action_dim, spec.state_dim):
        raise ValueError(
            f"the policy has {policy.action_dim} action and {policy.state_dim} state dimensions, {spec.id} has "
            f"{spec.action_dim} and {spec.state_dim}; use it where it was trained: env=..."
        )
    if WRIST_IMAGES in policy.in_keys and spec.wrist_image_shape is None:
        raise ValueError(
            f"the policy looks at wrist cameras and {spec.id} has none; use a checkpoint that was trained with one "
            "image"
        )
    # Large states have the longest numbers, for prompts that list them.
    policy.prompt_tokens([task.instruction for task in spec.tasks], torch.full((len(spec.tasks), spec.state_dim), 1e6))
