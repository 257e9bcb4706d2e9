# %% [markdown]
# # Evaluate and film a checkpoint
#
# How good is a policy, how sure is that, does it read, and what goes wrong? Two tasks of Meta-World share one scene:
# turn a faucet one way or the other. Only the sentence says which.

# %% tags=["parameters"]
DEMONSTRATIONS, CLONING_STEPS = 24, 300
TRIALS, FILMED = 16, 2  # episodes of each task; videos of the worst, and of the best

# %% [markdown]
# ## A checkpoint
#
# One is made here, by imitating the scripted experts for a minute. The second loss (`auxiliary`) teaches it where to
# look. With a policy of your own, such as `runs/ppo/latest/policy`, begin at `load_policy`; `environment.json` in its
# folder says how its environment was.

# %%
import os
from dataclasses import replace
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # before torch: its idle threads sleep

import torch
from IPython.display import Video, display

from vla_algos import BehaviourCloning, compare, evaluate, record_demonstrations
from vla_algos.ablations import swapped_instructions
from vla_algos.run.videos import save_videos
from vla_envs import Episode, evaluation_episodes, make_env
from vla_policies import load_policy, make_policy

torch.manual_seed(0)
env = make_env(
    "metaworld/faucet-open-v3+faucet-close-v3",
    num_envs=16,
    image_size=64,
    render_quality="minimal",
    hide_goals=True,  # which would tell the tasks apart
    camera={"lookat": [0.0, 0.68, 0.12], "distance": 0.75, "azimuth": 270, "elevation": -55},
    reset_ranges={f"faucet-{way}-v3": [[-0.1, 0.8, 0.0], [0.1, 0.85, 0.0]] for way in ("open", "close")},
)
spec = env.simulator_spec
policy = make_policy(spec, family="small")
shown = [Episode(task_id=trial % 2, trial_id=trial, seed=1_000_000) for trial in range(DEMONSTRATIONS)]
demonstrations = record_demonstrations(env, policy, shown)
cloning = BehaviourCloning(policy, demonstrations, steps=CLONING_STEPS, auxiliary=2.0)
for _ in range(CLONING_STEPS):
    cloning.step()
policy.save_pretrained("faucets")

# %% [markdown]
# ## How good is it?
#
# `evaluate` runs each episode of a list once, to its end. An episode is fixed by its task, trial and seed; these have a
# seed that no demonstration has. The interval is Wilson's, 95 %: of so few episodes it is wide.

# %%
policy = load_policy("faucets")
policy.check_environment(spec)  # cameras, states, actions and horizon are those that it was made for
episodes = evaluation_episodes(spec, TRIALS, seed=9_000_000)
result = evaluate(env, policy, episodes, record=len(episodes))
print(result.table())
print(*spec.protocol_deviations, sep="\n")

# %% [markdown]
# The lines below the table are what differs from the benchmark: they belong to every number that is published.
#
# ## Does it read?
#
# The same episodes with the sentence of the other task. Episodes are compared in pairs, which needs far fewer of them
# than two independent numbers. A policy that reads fails here; one that repeats a motion does not notice.

# %%
misled = evaluate(env, policy, episodes, observe=swapped_instructions(spec.tasks))
print(compare(result.episodes, misled.episodes).table("told right", "told wrong"))
env.close()

# %% [markdown]
# ## What does it do?
#
# The frames of each decision were kept. `save_videos` writes them as mp4 with the sentence and the return below; the
# name says how the episode ended. Look at failures first.

# %%
order = sorted(result.videos, key=lambda index: result.episodes[index].success_once)  # failures first
chosen = {index: result.videos[index] for index in order[:FILMED] + order[-FILMED:]}
fps = spec.control_frequency / policy.chunk_size  # as fast as it was
paths = save_videos(Path("videos"), replace(result, videos=chosen), fps)
display(*[Video(path, embed=True, html_attributes="controls loop muted") for path in paths])
