"""A policy that another process computes: observations go to its server, actions come back."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import urlsplit

import numpy as np
import torch
from annotated_types import Gt, Le
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType, exploration_type

from vla_common import keys
from vla_common.schema import EnvironmentShape
from vla_common.settings import Length, check_fields
from vla_common.texts import to_strings
from vla_policies.checkpoint.settings import SettingError
from vla_policies.policy import VLAPolicy
from vla_policies.remote.connections import Connections
from vla_policies.remote.wire import ProtocolName, complete_names, to_message


@dataclass(frozen=True)
class RemotePolicyConfig:
    """Settings of a :class:`RemotePolicy`.

    Attributes:
        action_low, action_high, state_dim, wrist_image_shape: of the environment.
        url: ``ws://HOST:PORT`` of the server.
        protocol: that it speaks, openpi's or vla-eval's.
        names: of observations by our keys, where they differ from :data:`~vla_policies.remote.wire.NAMES`; of
            ``wrist_images`` one for each camera; a dot leads into a map.
        num_action_chunks: actions of an answer that are executed before the next question; ``None`` for all of them.
        timeout: seconds that a decision may take, with what it takes to reach a server that was gone.
    """

    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    state_dim: int
    wrist_image_shape: tuple[int, int, int] | None = None
    url: str = ""
    protocol: ProtocolName = "openpi"
    names: Mapping[str, str | Sequence[str]] | None = None
    num_action_chunks: Length | None = None
    timeout: Annotated[float, Gt(0), Le(86_400)] = 60.0

    def __post_init__(self) -> None:
        check_fields(self)
        address = urlsplit(self.url)
        if address.scheme not in ("ws", "wss") or not address.hostname:
            raise SettingError(f"url={self.url}: must be the address of a server, such as ws://127.0.0.1:8000")


class RemotePolicy(VLAPolicy):
    """A policy behind a websocket: openpi's ``serve_policy.py``, a model server of vla-eval, or ``vla-recipe serve``.

    Whether it samples is the server's to say; there is nothing to learn here. A server of ours takes the observations
    of all environments in one message, so that it computes what a policy in this process would; others get one for
    each, all before the first answer is waited for. Outside of :func:`vla_algos.evaluate` no row's episode ends.
    """

    family: ClassVar[str] = "server"
    config_class: ClassVar[type[RemotePolicyConfig]] = RemotePolicyConfig
    shape_settings = (*VLAPolicy.shape_settings, "wrist_image_shape")
    needs_checkpoint: ClassVar[bool] = True  # of no other family; the server has it
    out_keys = (keys.ACTION,)

    def __init__(self, config: RemotePolicyConfig):
        super().__init__()
        self.config, self.state_dim = config, config.state_dim
        self.action_dim, self.chunk_size = len(config.action_low), config.num_action_chunks or 1
        self.names = complete_names(config.protocol, config.names)
        cameras = config.wrist_image_shape[0] if config.wrist_image_shape else 0
        wrists = (keys.WRIST_IMAGES,) if cameras else ()
        self.observations = (keys.IMAGES, *wrists, keys.STATES, keys.TASK_DESCRIPTIONS)
        self.in_keys = (*self.observations, keys.EPISODE_INDEX, keys.DECISION_INDEX)
        if wrists and len(self.names[keys.WRIST_IMAGES]) != cameras:
            raise SettingError(f"names.{wrists[0]}: must be {cameras} names, one for each wrist camera")
        self.connections = Connections(config.url, config.protocol, config.timeout)

    @classmethod
    def make(cls, shape: EnvironmentShape, checkpoint: str | Path | None = None, **settings: Any) -> Self:
        """Ask a server once what it answers to a black image, and make the policy of it.

        ValueError: ``checkpoint``, or actions that are not the environment's. ConnectionError: there is no answer.
        """
        if checkpoint is not None:
            raise SettingError(f"checkpoint={checkpoint}: the weights are the server's; leave it out, or policy=server")
        policy = super().make(shape, **settings)
        images = {keys.IMAGES: shape.image_shape, keys.WRIST_IMAGES: shape.wrist_image_shape}
        black = {key: np.zeros((1, *size, 3), np.uint8) for key, size in images.items() if size}
        texts = {keys.TASK_DESCRIPTIONS: [shape.tasks[0].instruction]}
        states = {keys.STATES: np.zeros((1, shape.state_dim), np.float32)}
        actions, longest = policy._ask({**black, **states, **texts}, [0], {0}), policy.config.num_action_chunks
        if actions.shape[-1] != policy.action_dim or actions.shape[1] < (longest or 1):
            wanted = f"{longest or 1} or more actions of {policy.action_dim} numbers, as {shape.id} has them"
            raise SettingError(f"url={policy.config.url}: answers with {list(actions.shape[1:])}; must be {wanted}")
        policy.config = replace(policy.config, num_action_chunks=longest or actions.shape[1])
        policy.chunk_size = longest or actions.shape[1]
        return policy

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        if exploration_type() == ExplorationType.RANDOM:
            raise ValueError("whether a policy of a server samples is said there; leave greedy=false out")
        rows = {key: tensordict.get(key).cpu().numpy() for key in self.observations if key != keys.TASK_DESCRIPTIONS}
        number = tensordict.shape[0]
        episodes = tensordict.get(keys.EPISODE_INDEX, torch.arange(number)).tolist()
        begun = tensordict.get(keys.DECISION_INDEX, torch.ones(number)).tolist()
        begins = {episode for episode, decisions in zip(episodes, begun, strict=True) if not decisions}
        actions = self._ask({**rows, keys.TASK_DESCRIPTIONS: to_strings(tensordict)}, episodes, begins)
        return tensordict.set(keys.ACTION, torch.from_numpy(actions[:, : self.chunk_size]))

    def _ask(self, rows: Mapping[str, Any], episodes: Sequence[int], begins: set[int]) -> np.ndarray:
        """Return actions ``[N, C, A]`` for observations ``[N, ...]``; zeros of rows without an episode."""
        if self.connections.metadata.get("batches"):
            return self.connections.ask({-1: to_message(rows, self.names)}, set())[-1]
        asked = {
            episode: to_message({key: value[row] for key, value in rows.items()}, self.names)
            for row, episode in enumerate(episodes)
            if episode >= 0
        }
        answers = self.connections.ask(asked, begins)
        shapes = {answer.shape for answer in answers.values()}
        if len(shapes) > 1:
            raise ValueError(f"the policy server at {self.config.url} answers with {sorted(shapes)}, several lengths")
        nothing = np.zeros(next(iter(shapes), (self.chunk_size, self.action_dim)), np.float32)
        return np.stack([answers.get(episode, nothing) for episode in episodes])

    def prompt_tokens(self, task_descriptions: Sequence[str], states: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros(len(task_descriptions), 0, dtype=torch.int64)

    def get_extra_state(self) -> dict[str, Any]:
        """Return what tells this policy from another: an evaluation is continued with the same server alone."""
        return {**asdict(self.config), "identity": self.connections.metadata.get("identity")}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no weight here."""

    def save_pretrained(self, folder: str | Path) -> None:
        raise ValueError("the weights of policy=server are the server's: it is evaluated, and not trained or saved")
