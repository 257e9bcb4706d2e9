# %% [markdown]
# # First PPO run, step by step
#
# A small Vision-Language-Action policy learns to press a button in Meta-World: it clones a dozen demonstrations, which
# do not show every place of the button, and PPO improves it by its own attempts. Each step is a cell, to be changed and
# run again. All of it takes some four minutes on two idle CPU cores.

# %% tags=["parameters"]
import os

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # before torch: its idle threads sleep

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image
from torch.nn.functional import huber_loss

from vla_algos import BehaviourCloning, StepCollector, evaluate, gae, record_demonstrations
from vla_envs import Episode, evaluation_episodes, make_env
from vla_policies import SmallVLA, SmallVLAConfig

torch.manual_seed(0)
ENVS, DECISIONS, ITERATIONS = 16, 64, 20  # simulators; decisions in each per iteration; iterations of PPO
DEMONSTRATIONS, CLONING_STEPS, HELD_OUT = 12, 400, 64

# %% [markdown]
# ## The environment
#
# `make_env` gives a TorchRL environment of several simulators. One step of it is one **decision**: a chunk of five
# actions, and one picture after them. The scene is a stand-in that fits a CPU, not the benchmark's: small pictures from
# a camera in front, a wider area for the button, and a reward for coming closer.

# %%
TASK = "button-press-topdown-v3"
env = make_env(
    f"metaworld/{TASK}",
    num_envs=ENVS,
    seed=0,
    image_size=64,
    render_quality="minimal",
    reward_type="progress",
    camera={"lookat": [0.0, 0.68, 0.12], "distance": 0.95, "azimuth": 270, "elevation": -50},
    reset_ranges={TASK: [[-0.25, 0.7, 0.115], [0.25, 0.9, 0.115]]},
)
spec, observation = env.simulator_spec, env.reset()
print(observation["task_descriptions"][0], tuple(observation["states"].shape))
Image.fromarray(np.hstack(observation["images"][:4].numpy())).resize((1024, 256))

# %% [markdown]
# ## The policy
#
# `SmallVLA` reads the sentence, looks at the picture and writes a distribution over tokens, 41 for each number of an
# action, and the value of the state. First it imitates Meta-World's scripted expert. An episode is fixed by its task,
# trial and seed; seeds keep demonstrations, training (0) and held-out episodes apart.

# %%
policy = SmallVLA(SmallVLAConfig(spec.action_low, spec.action_high, spec.state_dim, num_bins=41))
shown = [Episode(task_id=0, trial_id=trial, seed=1_000_000) for trial in range(DEMONSTRATIONS)]
cloning = BehaviourCloning(policy, record_demonstrations(env, policy, shown), steps=CLONING_STEPS)
for _ in range(CLONING_STEPS):
    cloning.step()

held_out = evaluation_episodes(spec, HELD_OUT, seed=9_000_000)
results = {0: evaluate(env, policy, held_out)}  # by iteration: the greedy policy, every episode once
print(results[0].table())

# %% [markdown]
# ## PPO
#
# New and old policy are compared token by token, and the ratio of their probabilities is clipped, so that one batch
# cannot carry the policy away. `step_mask` leaves out actions after an episode's end.


# %%
def losses(batch):
    log_prob, _, value = policy.evaluate_actions(batch)  # [B, 5, 4], the entropy, [B, 1]
    ratio = (log_prob - batch["action_log_prob"]).exp()
    advantage = batch["advantage"].unsqueeze(-1)
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return -gain[batch["next", "step_mask"]].mean(), huber_loss(value, batch["value_target"])


# %% [markdown]
# Each iteration collects decisions with the sampling policy, estimates their advantages, and takes four epochs of
# minibatches. In the first iteration only the critic learns: a critic that knows nothing would undo the cloning.

# %%
critic = list(policy.value_head.parameters())
actor = [weight for name, weight in policy.named_parameters() if not name.startswith("value_head")]
optimizer = torch.optim.Adam([{"params": actor, "lr": 3e-4}, {"params": critic, "lr": 1e-3}])
collector = StepCollector(env, policy, DECISIONS)

successes = []
for iteration in range(ITERATIONS):
    policy.eval()
    batch = gae(collector.rollout(), gamma=0.9, lmbda=0.9)  # [ENVS, DECISIONS]
    successes.append(batch["next", "success"][batch["next", "done"]].float().mean().item())
    policy.train()
    decisions = batch[batch["next", "step_mask"].any(-1)]  # without those whose simulator died
    for _ in range(4):
        for rows in torch.randperm(len(decisions)).split(128):
            policy_loss, value_loss = losses(decisions[rows])
            optimizer.zero_grad()
            (value_loss if iteration == 0 else policy_loss + 0.5 * value_loss).backward()
            torch.nn.utils.clip_grad_norm_(actor, 1.0)
            torch.nn.utils.clip_grad_norm_(critic, 1.0)
            optimizer.step()
    print(f"iteration {iteration + 1}: success {successes[-1]:.0%}, value loss {value_loss:.3f}")
    if (iteration + 1) % 4 == 0:
        results[iteration + 1] = evaluate(env, policy, held_out)

# %% [markdown]
# ## What was learnt
#
# The same held-out episodes each time, with 95 % intervals. In training actions are sampled, and episodes that are
# solved early count more often: the dotted line is another number.

# %%
print(results[ITERATIONS].table())
env.close()

_, axes = plt.subplots(figsize=(6, 3))
axes.plot(list(results), [result.success_once for result in results.values()], marker="o", label="held out, greedy")
axes.fill_between(list(results), *zip(*(result.interval for result in results.values()), strict=True), alpha=0.2)
axes.plot(range(1, ITERATIONS + 1), successes, ":", label="training, sampled")
axes.set(xlabel="iteration", ylabel="success", ylim=(0, 1))
axes.legend()
plt.show()

# %% [markdown]
# One seed of one small run; [the default run](../recipes/ppo.md) has several. Next: [your own
# simulator](own_simulator.py), and [evaluate and film a checkpoint](evaluate_and_film.py).
