"""What a recipe asks of a collector; one of your own needs no more: ``docs/how-to/add-a-collector.md``."""

from typing import Any, Protocol

from tensordict import TensorDictBase


class Collector(Protocol):
    """Has the policy act in the environments; ``stats()``, numbers for the log by name, may be there too."""

    def rollout(self) -> TensorDictBase:
        """Return decisions ``[N, T]`` of ``N`` environments in time order: what the loss and the advantages read."""

    def reset(self) -> Any:
        """Abandon the episodes that run: an evaluation has used the simulators."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers and texts with which another process continues."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Continue where :meth:`state_dict` was called."""
