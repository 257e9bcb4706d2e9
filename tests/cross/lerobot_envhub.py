"""LeRobot runs our benchmarks by ``examples/envhub/env.py``: by hand, in an environment of LeRobot's own. No test.

    python3.12 -m venv FOLDER
    FOLDER/bin/pip install "lerobot[dataset]==0.6.1" "torch<2.12" pydantic annotated-types lazy-loader hydra-core scipy
    FOLDER/bin/pip install metaworld==3.1.1 mujoco==3.3.0 mani_skill==3.0.1 pybullet==3.2.7 numpy-quaternion gitpython
    FOLDER/bin/pip install --no-deps . ./examples/add_benchmark
    export HF_HUB_OFFLINE=1
    FOLDER/bin/python tests/cross/lerobot_envhub.py metaworld/MT50 calvin/D maniskill/plate25-ood toy/discs

LeRobot loads the file as that of a hub repository, which lies in a cache made here, and its ``eval_policy`` runs two
episodes of the first and the last task side by side. The policy is a function of the state. Each episode is run again
by :class:`vla_envs.gym.SimulatorEnv` as trial 0 or 1: states, images, rewards and success have to be equal. One of
toy/discs is solved, others are not.
"""

import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np

SEED, STEPS = 1000, 40
ENV = Path(__file__).parents[2] / "examples/envhub/env.py"
REPOSITORY, REVISION = "owner/vla", "0" * 40


def steer(states, actions):
    """Return actions ``[N, A]`` that depend on the states ``[N, S]``, within the bounds of a Box."""
    order = np.arange(actions.shape[-1])
    turn = np.sin(3 * states[:, :1] * (order + 1) + 4 * states[:, -1:] + order)
    return (actions.low + (turn + 1) / 2 * (actions.high - actions.low)).astype(np.float32)


def make_policy(space, seen):
    """Make a policy of LeRobot's that steers, and appends digests of what it saw to ``seen``."""
    import torch
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.pretrained import PreTrainedPolicy

    class Steering(PreTrainedPolicy):
        config_class, name = ACTConfig, "steering"

        def reset(self):
            pass

        def select_action(self, batch):
            cameras = sorted(key for key in batch if key.startswith("observation.images."))
            images = [(batch[key] * 255).round().byte().permute(0, 2, 3, 1).numpy() for key in cameras]
            states = batch["observation.state"].numpy()
            seen.append([digest(states[n], *(each[n] for each in images)) for n in range(len(states))])
            assert all(batch["task"]), "no instruction"
            return torch.from_numpy(steer(states, space))

        def _unused(self, *_, **__):
            raise NotImplementedError

        get_optim_params = forward = predict_action_chunk = _unused

    return Steering(ACTConfig(device="cpu"))


def digest(*arrays):
    return [zlib.crc32(np.ascontiguousarray(array).tobytes()) for array in arrays]


def again(spec, task_id, trial_id):
    """Run an episode here; returns digests of what was seen, the sum of rewards, and success."""
    from vla_envs.gym import SimulatorEnv

    env = SimulatorEnv(spec)
    space = env.action_space
    observation, _ = env.reset(seed=SEED, options={"task_id": task_id, "trial_id": trial_id})
    seen, total, done, info = [], 0.0, False, {}
    while not done:
        wrists = observation.get("wrist_images", ())
        seen.append(digest(observation["states"], observation["images"], *wrists))
        actions = steer(observation["states"][None], space)[0]
        observation, reward, terminated, truncated, info = env.step(actions)
        total, done = total + reward, terminated or truncated
    env.close()
    return seen, total, info["is_success"]


def main(benchmarks):
    """Evaluate each benchmark as LeRobot does, and again here."""
    from lerobot.envs import make_env
    from lerobot.scripts.lerobot_eval import eval_policy

    sys.dont_write_bytecode = True  # the file changes faster than its time
    with tempfile.TemporaryDirectory() as cache:
        snapshot = Path(cache) / f"models--{REPOSITORY.replace('/', '--')}/snapshots/{REVISION}"
        snapshot.mkdir(parents=True)
        for name in benchmarks:
            (snapshot / "env.py").write_text(ENV.read_text().replace('"metaworld/MT50"', f'"{name}"'))
            hub = f"{REPOSITORY}@{REVISION}"
            groups = make_env(hub, n_envs=2, hub_cache_dir=cache, trust_remote_code=True)
            tasks = [(number, envs) for group in groups.values() for number, envs in group.items()]
            for number, envs in dict([tasks[0], tasks[-1]]).items():
                compare(eval_policy, name, number, envs)


def compare(eval_policy, name, number, envs):
    """Run two episodes of a task by LeRobot's loop and here, at most STEPS actions each."""
    from dataclasses import replace

    envs.simulator_spec = spec = replace(envs.simulator_spec, max_episode_steps=STEPS)
    seen = []
    policy = make_policy(envs.single_action_space, seen)
    done = eval_policy(envs, policy, *[lambda batch: batch] * 4, 2, start_seed=SEED)
    envs.close()
    for trial, result in enumerate(done["per_episode"]):
        shown, total, success = again(spec, number, trial)
        theirs = [step[trial] for step in seen[: len(shown)]]
        assert theirs == shown, f"{name} task {number} trial {trial}: other states or images"
        assert np.isclose(result["sum_reward"], total)
        assert bool(result["success"]) is bool(success)
        print(f"{name}, task {number}, trial {trial}: {len(shown)} steps, the same; success {success}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
