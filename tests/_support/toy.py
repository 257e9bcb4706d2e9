"""A toy environment and policy for testing algorithms: the keys of the data contract, no simulator."""

from collections import deque
from types import SimpleNamespace

import torch
from tensordict import NonTensorStack, TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.data import Binary, Bounded, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, exploration_type

from vla_common.keys import (
    ACTION,
    ACTION_LOG_PROB,
    ACTION_TOKENS,
    ACTIONS_CLIPPED,
    CRASHED,
    DONE,
    EPISODE_LEN,
    EPISODE_RETURN,
    GROUP_ID,
    IMAGES,
    REWARD,
    STATE_VALUE,
    STATES,
    STEP_MASK,
    STEP_REWARDS,
    SUCCESS,
    SUCCESS_AT_END,
    TASK_DESCRIPTIONS,
    TASK_ID,
    TERMINATED,
    TRIAL_ID,
    TRUNCATED,
)
from vla_envs.episodes import EpisodeQueue
from vla_envs.simulator import Episode, Task
from vla_policies import VLAPolicy

CHUNK, DIM = 3, 5  # an odd number of dimensions, so that the mean of +-1 is never 0
INSTRUCTIONS = ("go low", "go high")


class ToyEpisodes:
    """An endless source of episodes: task and trial count up."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> Episode:
        self.count += 1
        return Episode(task_id=self.count % 2, trial_id=self.count, group_id=self.count)

    def state_dict(self) -> dict:
        return {"count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]


class ToyEnv(EnvBase):
    """Push all action dimensions to the side the picture shows: task 0 down, task 1 up.

    An action whose mean has the right sign scores one point; ``goal`` points are success, which gives
    the only reward and terminates. ``states`` is ``[steps, points, trial]``, so every observation can be
    recognised. Trials in ``crashes`` lose the simulator in their second decision, as often as the mapping
    says.
    """

    def __init__(self, num_envs: int, horizon: int = 7, goal: int = 5, crashes: dict[int, int] | None = None):
        super().__init__(device=torch.device("cpu"), batch_size=torch.Size([num_envs]))
        self.num_envs, self.horizon, self.goal = num_envs, horizon, goal
        self.crashes = dict(crashes or {})
        self.episodes = ToyEpisodes()
        self.current_episodes: list[Episode | None] = [None] * num_envs
        self.worker_restarts = self.interactions = 0
        tasks = [Task(f"task-{i}", text) for i, text in enumerate(INSTRUCTIONS)]
        self.simulator_spec = SimpleNamespace(tasks=tasks, chain_length=1, protocol_deviations=())
        n, flag = num_envs, Binary(1, (num_envs, 1), dtype=torch.bool)
        self.action_spec = Bounded(-1, 1, (n, CHUNK, DIM))
        done_keys = (DONE, TERMINATED, TRUNCATED)
        self.full_done_spec = Composite({key: flag.clone() for key in done_keys}, shape=[n])
        self.observation_spec = Composite(
            {
                IMAGES: Bounded(0, 255, (n, 4, 4, 3), dtype=torch.uint8),
                STATES: Unbounded((n, 3)),
                TASK_DESCRIPTIONS: NonTensor((n,), example_data="go"),
                **{key: Unbounded((n,), dtype=torch.int64) for key in (TASK_ID, TRIAL_ID, GROUP_ID)},
            },
            shape=[n],
        )
        self.reward_spec = Composite(
            {
                REWARD: Unbounded((n, 1)),
                STEP_REWARDS: Unbounded((n, CHUNK)),
                STEP_MASK: Binary(CHUNK, (n, CHUNK), dtype=torch.bool),
                **{key: flag.clone() for key in (SUCCESS, SUCCESS_AT_END, CRASHED)},
                EPISODE_RETURN: Unbounded((n, 1)),
                EPISODE_LEN: Unbounded((n, 1), dtype=torch.int64),
                ACTIONS_CLIPPED: Unbounded((n, 1)),
            },
            shape=[n],
        )
        self.points, self.steps = [0] * n, [0] * n
        self.is_closed = False

    def _set_seed(self, seed: int | None) -> None: ...

    def set_episodes(self, source: ToyEpisodes | EpisodeQueue) -> None:
        self.episodes = source

    def state_dict(self) -> dict:
        """Its running episodes are not in it: what is loaded starts with the next ones."""
        return {"sampler": self.episodes.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.episodes.load_state_dict(state["sampler"])
        self.reset()

    def observe(self) -> TensorDict:
        running = torch.zeros(self.num_envs, 1, dtype=torch.bool)
        return self._observe(**{key: running.clone() for key in (DONE, TERMINATED, TRUNCATED)})

    def _observe(self, **outcome: torch.Tensor) -> TensorDict:
        episodes = [episode or Episode(-1, -1, group_id=-1) for episode in self.current_episodes]
        td = self.full_observation_spec.zero()
        brightness = [200 * max(e.task_id, 0) for e in episodes]
        td[IMAGES] += torch.tensor(brightness, dtype=torch.uint8).view(-1, 1, 1, 1)
        trials = [e.trial_id for e in episodes]
        td[STATES] = torch.tensor([self.steps, self.points, trials]).float().T.contiguous()
        td[TASK_DESCRIPTIONS] = NonTensorStack(*[INSTRUCTIONS[max(e.task_id, 0)] for e in episodes])
        td[TASK_ID] = torch.tensor([e.task_id for e in episodes])
        td[TRIAL_ID] = torch.tensor([e.trial_id for e in episodes])
        td[GROUP_ID] = torch.tensor([e.group_id for e in episodes])
        td.update(outcome)
        return td

    def _reset(self, tensordict: TensorDict | None = None) -> TensorDict:
        self.interactions += 1
        mask = None if tensordict is None else tensordict.get("_reset", None)
        for slot in range(self.num_envs):
            if mask is None or mask[slot].any():
                self.current_episodes[slot] = self.episodes.next()
                self.points[slot] = self.steps[slot] = 0
        return self.observe()

    def _step(self, tensordict: TensorDict) -> TensorDict:
        self.interactions += 1
        n = self.num_envs
        rewards, mask = torch.zeros(n, CHUNK), torch.zeros(n, CHUNK, dtype=torch.bool)
        crashed, idle = torch.zeros(n, 1, dtype=torch.bool), torch.zeros(n, 1, dtype=torch.bool)
        for slot, episode in enumerate(self.current_episodes):
            if episode is None:
                idle[slot] = True
            elif self.steps[slot] and self.crashes.get(episode.trial_id, 0) > 0:
                self.crashes[episode.trial_id] -= 1
                self.worker_restarts += 1
                crashed[slot] = True
            else:
                for step, action in enumerate(tensordict[ACTION][slot]):
                    if self.points[slot] >= self.goal or self.steps[slot] >= self.horizon:
                        break
                    point = (action.mean() > 0).item() == bool(episode.task_id)
                    self.points[slot] += point
                    self.steps[slot] += 1
                    rewards[slot, step], mask[slot, step] = float(self.points[slot] == self.goal), True
        success = torch.tensor(self.points).unsqueeze(-1) >= self.goal
        steps = torch.tensor(self.steps).unsqueeze(-1)
        truncated = ((steps >= self.horizon) & ~success) | crashed | idle
        outcome = {
            STEP_REWARDS: rewards, STEP_MASK: mask, SUCCESS: success, SUCCESS_AT_END: success, CRASHED: crashed,
            EPISODE_RETURN: success.float(), EPISODE_LEN: steps, ACTIONS_CLIPPED: torch.zeros(n, 1),
            REWARD: rewards.sum(-1, keepdim=True),
            TERMINATED: success, TRUNCATED: truncated, DONE: success | truncated,
        }  # fmt: skip
        return self._observe(**outcome)


def toy_suite():
    """Two of them, as those of a benchmark that a recipe evaluates on."""
    env = ToyEnv(2)
    known = {"id": "toy", "trials": 2, "initial_states": None, "evaluation_trials": None}
    env.simulator_spec = SimpleNamespace(**vars(env.simulator_spec), **known)
    return env


class ToyPolicy(VLAPolicy):
    """Two bins per action dimension, -1 and 1, from the mean pixel and the progress; counts its passes."""

    in_keys = [IMAGES, STATES, TASK_DESCRIPTIONS]
    loss_keys = [IMAGES, STATES, ACTION_TOKENS]
    out_keys = [ACTION, ACTION_TOKENS, ACTION_LOG_PROB, STATE_VALUE]

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, CHUNK * DIM * 2 + 1))
        self.passes: deque[int] = deque()

    def check_environment(self, shape: object) -> None:
        """It acts in whatever has the keys."""

    def _run(self, td: TensorDict) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        self.passes.append(td.shape[0])
        pixel = td[IMAGES].float().mean((-1, -2, -3)).unsqueeze(-1) / 255
        features = self.body[:-1](torch.cat([pixel, td[STATES][:, :2] / 10], -1))
        out = self.body[-1](features)
        logits = out[:, :-1].reshape(-1, CHUNK, DIM, 2)
        return torch.distributions.Categorical(logits=logits), self._value(features, out[:, -1:])

    def _value(self, features: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value

    def forward(self, td: TensorDict) -> TensorDict:
        dist, value = self._run(td)
        tokens = dist.sample() if exploration_type() == ExplorationType.RANDOM else dist.logits.argmax(-1)
        td[ACTION], td[ACTION_TOKENS], td[ACTION_LOG_PROB] = 2.0 * tokens - 1.0, tokens, dist.log_prob(tokens)
        td[STATE_VALUE] = value
        return td

    def get_dist(self, td: TensorDict) -> torch.distributions.Categorical:
        return self._run(td)[0]

    def evaluate_actions(self, td: TensorDict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dist, value = self._run(td)
        return dist.log_prob(td[ACTION_TOKENS]), dist.entropy(), value


class ToyActorCritic(ToyPolicy):
    """With a ``value_head`` on the policy's features, as the real policies have; ``values`` is 1 or ``CHUNK``."""

    def __init__(self, values: int = 1, detach: bool = False) -> None:
        super().__init__()
        self.value_head, self.detach = nn.Linear(16, values), detach

    def _value(self, features: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.value_head(features.detach() if self.detach else features)


class Given(TensorDictModuleBase):
    """Returns the entries ``("given", ...)`` of the batch: a loss on them has gradients that can be looked at."""

    in_keys = out_keys = loss_keys = []

    def evaluate_actions(self, td: TensorDict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return td["given", "log_prob"], td["given", "entropy"], td.get(("given", "value"), None)
