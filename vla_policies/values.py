"""The critic of a policy as a module of its own, for losses and value estimators that want one."""

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_common.keys import STATE_VALUE
from vla_policies.batch import refuse_vmap


class ValueOperator(TensorDictModuleBase):
    """Writes ``state_value`` ``[*B, 1]`` or ``[*B, C]``; its parameters are the policy's, which has a value head.

    Of stored decisions (with the policy's ``loss_keys``) it is the value of ``evaluate_actions``, with its gradient; of
    observations alone that of the greedy decision, without one: what collectors store for final observations. It leaves
    actions and the random state alone. TorchRL's value estimators take it with ``deactivate_vmap=True``, and with
    instructions as tensors (:class:`vla_envs.InstructionsToBytes`) where the policy reads any.
    """

    def __init__(self, policy: TensorDictModuleBase):
        if not policy.num_values:
            raise ValueError(f"{type(policy).__name__} has no value head; make it with value_head=True")
        super().__init__()
        self.policy = policy
        self.in_keys, self.out_keys = list(policy.in_keys), [STATE_VALUE]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``state_value``; ValueError: a gradient is wanted without stored decisions, or torch.vmap calls."""
        refuse_vmap(tensordict)
        missing = [key for key in self.policy.loss_keys if key not in tensordict.keys(True)]
        if not missing:
            return tensordict.set(STATE_VALUE, self.policy.evaluate_actions(tensordict)[2])
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.policy.parameters()):
            raise ValueError(
                f"a gradient needs policy.loss_keys in the batch, which lacks {missing}; or use torch.no_grad()"
            )
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            return tensordict.set(STATE_VALUE, self.policy(tensordict.select(*self.policy.in_keys)).get(STATE_VALUE))
