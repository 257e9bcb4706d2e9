"""Save an environment with all its transforms in the middle of its episodes, and continue there in another process."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase, is_non_tensor
from torch import nn
from torch.nn.parameter import is_lazy
from torchrl.envs import EnvBase, TransformedEnv

from vla_envs.env import base_env


def save_state(env: EnvBase, observation: TensorDictBase | None) -> dict[str, Any]:
    """Return what :func:`load_state` needs: tensors, numbers and texts.

    ``env`` is a :class:`~vla_envs.env.VLAEnv`, with or without transforms; ``observation`` what the policy would see
    next, ``None`` if no episode is running. It is kept as far as the environment alone could not give it again.
    """
    inner = base_env(env)
    state: dict[str, Any] = {"env": inner.state_dict(), "transforms": transforms_state(env)}
    if observation is not None:
        raw = inner.observe() if env is not inner else observation
        state["observation"] = {
            key: None if _same(value, raw.get(key, None)) else _plain(value) for key, value in observation.items()
        }
    return state


def load_state(env: EnvBase, state: dict[str, Any]) -> TensorDictBase | None:
    """Continue where :func:`save_state` was called, with an environment that is made alike; else a ``ValueError``.

    Returns the observation that was given to :func:`save_state`, to the bit.
    """
    inner = base_env(env)
    inner.load_state_dict(state["env"])
    load_transforms(env, state["transforms"])
    if "observation" not in state:
        return None
    observation = inner.observe()
    raw = set(observation.keys())
    for key, value in state["observation"].items():
        if value is not None:
            observation[key] = _unplain(value, inner)
        elif key not in raw:
            raise ValueError(f"the saved run observed {key!r}, which is not there; resume with its environment")
    return observation.select(*state["observation"])


def transforms_state(env: EnvBase) -> list[dict[str, Any]]:
    """Return what the transforms of an environment keep from step to step, outermost first."""
    return [_state_of(transform) for transform in _transforms(env)]


def load_transforms(env: EnvBase, states: list[dict[str, Any]]) -> None:
    """Restore :func:`transforms_state`; ``ValueError`` if the environment has other transforms."""
    transforms = list(_transforms(env))
    if len(transforms) != len(states):
        raise ValueError(
            f"the saved run had {len(states)} transformed environments around the simulators, this one has "
            f"{len(transforms)}; resume with the transforms of the saved run"
        )
    for transform, saved in zip(transforms, states, strict=True):
        _load(transform, saved)


def _transforms(env: EnvBase) -> Iterator[nn.Module]:
    while isinstance(env, TransformedEnv):
        yield env.transform
        env = env.base_env


def _state_of(transform: nn.Module) -> dict[str, Any]:
    """Copy what a transform keeps from step to step; buffers that have not seen a frame yet are left out."""
    empty = {name for name, buffer in transform.named_buffers() if is_lazy(buffer)}
    return {name: copy.deepcopy(value) for name, value in transform.state_dict().items() if name not in empty}


def _load(transform: nn.Module, state: dict[str, Any]) -> None:
    for name, buffer in list(transform.named_buffers()):
        if name in state and (is_lazy(buffer) or buffer.shape != state[name].shape):  # made by the first frame
            owner, _, attribute = name.rpartition(".")
            setattr(transform.get_submodule(owner), attribute, torch.empty_like(state[name], device=buffer.device))
    empty = {name for name, buffer in transform.named_buffers() if is_lazy(buffer)}
    missing, unexpected = transform.load_state_dict(copy.deepcopy(state), strict=False)
    if wrong := sorted({*missing, *unexpected} - empty):
        raise ValueError(
            f"the saved run had other transforms, they differ in {', '.join(wrong)}; resume with those of the saved run"
        )


def _same(value: Any, raw: Any) -> bool:
    if value is raw:
        return True
    if isinstance(value, torch.Tensor) and isinstance(raw, torch.Tensor):
        return value.dtype == raw.dtype and value.shape == raw.shape and torch.equal(value, raw)
    return raw is not None and is_non_tensor(value) and is_non_tensor(raw) and value.tolist() == raw.tolist()


def _plain(value: Any) -> Any:
    if is_non_tensor(value):
        return value.tolist()
    if isinstance(value, TensorDictBase):
        return {key: _plain(item) for key, item in value.items()}
    return value.detach().to("cpu", copy=True)


def _unplain(value: Any, env: EnvBase) -> Any:
    if isinstance(value, list):
        return NonTensorStack(*value)
    if isinstance(value, dict):
        return TensorDict({key: _unplain(item, env) for key, item in value.items()}, env.batch_size, env.device)
    return value.to(env.device)
