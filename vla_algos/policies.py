"""Policies as collectors take them: any module or callable that takes a TensorDict and writes ``action``."""

from collections.abc import Callable
from typing import Any, TypeAlias

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.envs import EnvBase

from vla_common.keys import ACTION, STATE_VALUE

Policy: TypeAlias = TensorDictModuleBase | Callable[[TensorDictBase], TensorDictBase]


def as_module(policy: Policy, env: EnvBase) -> TensorDictModuleBase:
    """Return a policy with ``in_keys`` and ``out_keys``; a callable, such as ``RandomPolicy``, gets all of ``env``'s.

    A ``TypeError`` if it is not callable, a ``ValueError`` if it writes no ``action``.
    """
    if not (hasattr(policy, "in_keys") and hasattr(policy, "out_keys")):
        return _Callable(policy, env)
    if ACTION not in policy.out_keys:
        raise ValueError(
            f"{type(policy).__name__} writes {list(policy.out_keys)} and no {ACTION!r}, which the environment takes; "
            f"name its output so: out_keys=[{ACTION!r}]"
        )
    return policy  # or anything else that has these keys, such as a compiled module


def loss_keys(policy: TensorDictModuleBase) -> list[Any]:
    """List the entries of a decision that a loss needs: ``policy.loss_keys``, or all that it reads and writes."""
    own = getattr(policy, "loss_keys", None)
    if own is not None:
        return list(own)
    return [key for key in dict.fromkeys([*policy.in_keys, *policy.out_keys]) if key != STATE_VALUE]


class _Callable(TensorDictModuleBase):
    """A callable without keys: it gets all observations, and its action alone is kept."""

    def __init__(self, function: Callable[[TensorDictBase], TensorDictBase], env: EnvBase):
        if not callable(function):
            raise TypeError(
                f"a policy is a TensorDictModule or callable that writes {ACTION!r}, not {type(function).__name__}"
            )
        super().__init__()
        if hasattr(function, "set_action_spec_from_env"):  # RandomPolicy() asks the collector
            function.set_action_spec_from_env(env)
        self.function = function
        self.in_keys, self.out_keys, self.loss_keys = list(env.observation_spec.keys()), [ACTION], ()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        name, problem = type(self.function).__name__, None
        try:
            decision: Any = self.function(tensordict)
        except TypeError as error:
            if not isinstance(self.function, nn.Module):
                raise
            decision, problem = None, error  # a network of tensors, such as nn.Linear
        if not isinstance(decision, TensorDictBase) or decision.get(ACTION, None) is None:
            raise TypeError(
                f"a policy takes a TensorDict and returns it with {ACTION!r}, {name} does not; wrap what takes "
                f"tensors: TensorDictModule(network, in_keys=['states'], out_keys=[{ACTION!r}])"
            ) from problem
        return decision
