"""A policy as it was earlier, in place: for a penalty on the distance from where it began."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from vla_policies.sharding import reshard


class ReferenceWeights(nn.Module):
    """Mixin of a policy that can be what it was: :meth:`trained_weights` then, :meth:`reference_weights` now."""

    def trained_weights(self) -> dict[str, Tensor]:
        """Return copies of the parameters that are trained, by name; of a sharded policy those of its parts."""
        reshard(self)
        trained = ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)
        return {name: parameter.detach().clone() for name, parameter in trained}

    @contextlib.contextmanager
    def reference_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Be the policy with earlier :meth:`trained_weights`, which hold its own within; nothing is learnt there.

        The rest, frozen weights and what is scheduled, is the policy's own: with adapters a reference takes no more
        memory than these. A sharded policy is gathered within, not around it.
        """
        modes = [(module, module.training) for module in self.modules()]
        self._exchange(weights)
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        try:
            self.eval().requires_grad_(False)  # torch computes otherwise, in the last bit, where it is True
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode
            self._exchange(weights)
            for parameter in trained:
                parameter.requires_grad_(True)

    def _exchange(self, weights: Mapping[str, Tensor]) -> None:
        """Swap parameters and ``weights`` in place, unseen by autograd and by tensors' version counters."""
        reshard(self)
        parameters = dict(self.named_parameters())
        for name, other in weights.items():
            own = parameters[name].data
            kept = own.clone()
            own.copy_(other)
            other.data.copy_(kept)
