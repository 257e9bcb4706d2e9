# %% [markdown]
# # Your own simulator in ten minutes
#
# A simulator is a class in numpy with four methods, for one world. Batches, processes that may crash, horizons and
# restarts come from the library. Here it is an arm with two joints and two balls, of which a sentence names one.

# %% [markdown]
# ## The class
#
# - `reset` draws the initial state from the episode's task, trial and seed, and from nothing else: the same episode is
#   the same picture in any process and any order, or two policies could not be compared.
# - `step` executes one action and draws nothing. A decision of five actions costs five steps and one picture.
# - `observe` draws: a picture, the numbers that the robot knows of itself, and the sentence. `close` frees the world.
#
# `expert_action` may be missing: what solves the episode, to be imitated. Simulators run in processes of their own,
# which import the class from a file: the last line writes this cell, `In[-1]` in Jupyter, to one.

# %%
from pathlib import Path

import numpy as np

from vla_envs import Observation, Outcome

COLOURS = {"red": (220, 50, 40), "blue": (40, 80, 220)}
RADIUS, STRIDE = 0.12, 0.12  # of a ball; of an action, in radians


class ArmWorld:  # points of the plane are complex numbers
    def __init__(self, spec):
        self.spec, line = spec, np.linspace(-1, 1, spec.image_shape[0])
        self.pixels = line - 1j * line[:, None]  # [H, W]

    def reset(self, episode):
        random = np.random.default_rng([episode.seed, episode.task_id, episode.trial_id])
        angles = np.pi * (random.permutation([0.2, 0.6]) + random.uniform(0, 0.2, size=2))
        self.balls = random.uniform(0.5, 0.85, size=2) * np.exp(1j * angles)
        self.joints, self.task_id = np.array([np.pi / 2, 0]), episode.task_id

    def step(self, action):
        before = self.distance(self.joints)
        self.joints = self.joints + STRIDE * np.clip(action, -1, 1)
        after = self.distance(self.joints)
        return Outcome(reward=before - after + (after < RADIUS), success=after < RADIUS)

    def observe(self):
        image = np.full((*self.pixels.shape, 3), 245, np.uint8)
        for ball, colour in zip(self.balls, COLOURS.values(), strict=True):
            image[abs(self.pixels - ball) < RADIUS] = colour
        elbow, hand = self.arm(self.joints)
        for start, end in ((0, elbow), (elbow, hand)):
            along = np.clip(((self.pixels - start) / (end - start)).real, 0, 1)
            image[abs(self.pixels - start - along * (end - start)) < 0.05] = 40
        states = np.float32([*self.joints, hand.real, hand.imag])
        return Observation(image, states, self.spec.tasks[self.task_id].instruction)

    def close(self):
        pass

    def expert_action(self):  # of nine actions the one that ends closest
        actions = [(first, second) for first in (-1, 0, 1) for second in (-1, 0, 1)]
        return np.float32(min(actions, key=lambda action: self.distance(self.joints + STRIDE * np.array(action))))

    def arm(self, joints):
        elbow = 0.5 * np.exp(1j * joints[0])
        return elbow, elbow + 0.4 * np.exp(1j * sum(joints))

    def distance(self, joints):
        return float(abs(self.balls[self.task_id] - self.arm(joints)[1]))


if __name__ == "__main__":
    Path("arm_world.py").write_text(In[-1])

# %% [markdown]
# ## The environment
#
# The description is what there is to know without starting it. A mistake in the class is a crashed episode in a batch:
# `vla_envs.check_simulator(spec)` finds it, and what is not the same in another process or order.

# %% tags=["parameters"]
import os

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # before torch: its idle threads sleep

import torch
from PIL import Image

from vla_algos import BehaviourCloning, ChunkClipPPOLoss, Learner, StepCollector, evaluate, gae, record_demonstrations
from vla_envs import Episode, SimulatorSpec, Task, evaluation_episodes, make_env
from vla_policies import SmallVLA, SmallVLAConfig

ENVS, DECISIONS, ITERATIONS = 32, 32, 8  # simulators; decisions in each per iteration; iterations of PPO
DEMONSTRATIONS, CLONING_STEPS, HELD_OUT = 48, 300, 32

# %%
tasks = tuple(Task(colour, f"touch the {colour} ball") for colour in COLOURS)
shapes = {"image_shape": (48, 48), "state_dim": 4, "action_low": (-1, -1), "action_high": (1, 1)}
limits = {"trials": 50, "max_episode_steps": 40, "control_frequency": 10}
spec = SimulatorSpec("arm", "arm_world:ArmWorld", tasks, **shapes, **limits)
world = ArmWorld(spec)
world.reset(Episode(task_id=0, trial_id=0))
print(world.observe().task_description, world.observe().states, world.step(world.expert_action()).reward)

env = make_env(spec, num_envs=ENVS, seed=0)
rollout = env.rollout(8, break_when_any_done=False)  # random actions; [ENVS, 8] decisions
print(rollout["images"].shape, rollout["action"].shape, "crashed:", rollout["next", "crashed"].any().item())
Image.fromarray(np.vstack([np.hstack(row) for row in rollout["images"][:3].numpy()])).resize((1152, 432), 0)

# %% [markdown]
# ## Learn
#
# Each row above is an episode. `SmallVLA` imitates the expert first, then learns by PPO.

# %%
torch.manual_seed(0)
policy = SmallVLA(SmallVLAConfig(spec.action_low, spec.action_high, spec.state_dim, num_bins=21))
shown = [Episode(task_id=trial % 2, trial_id=trial, seed=1_000_000) for trial in range(DEMONSTRATIONS)]
cloning = BehaviourCloning(policy, record_demonstrations(env, policy, shown), steps=CLONING_STEPS)
for _ in range(CLONING_STEPS):
    cloning.step()
held_out = evaluation_episodes(spec, HELD_OUT, seed=9_000_000)  # training has seed 0
print(evaluate(env, policy, held_out).table())

collector, loss = StepCollector(env, policy, DECISIONS), ChunkClipPPOLoss(policy)
learner = Learner(loss, lr=3e-4, value_lr=1e-3, epochs=4, minibatch_size=128, critic_warmup_steps=16)
for iteration in range(ITERATIONS):
    batch = gae(collector.rollout(), gamma=0.9, lmbda=0.9)
    learner.update(batch)
    print(f"iteration {iteration}: return {batch['next', 'episode_return'][batch['next', 'done']].mean():.2f}")
print(evaluate(env, policy, held_out).table())
env.close()

# %% [markdown]
# From here: [the same as a package](../../examples/add_benchmark/README.md), which recipes, Gymnasium and the command
# line find, and [the checks](../how-to/add-a-benchmark.md#check-it) to hold it to.
