"""Record what LeRobot's own evaluation loop and environments do, for ``tests/sim/test_lerobot_protocol.py``.

Run by LeRobot's Python, which needs nothing of this project: 0.6.2 at commit 7427f3180, with metaworld 3.1.1, hf-libero
0.1.4, robosuite 1.4.0, mujoco 3.3.0 and LIBERO's assets, or stand-ins for them.

    python tests/cross/record_lerobot_environments.py metaworld tests/golden/lerobot_metaworld.npz
    python tests/cross/record_lerobot_environments.py libero tests/golden/lerobot_libero.npz

LeRobot makes the environments, one at a time (``--eval.batch_size=1``), and its ``eval_policy`` runs the episodes from
seed 1000 on, as ``lerobot-eval`` does. The policy is :func:`steer`. ``--frames FILE`` keeps digests of all frames too.
"""

import argparse
import zlib

import numpy as np

EVERY = 7  # steps between the pictures that are kept
COARSE = slice(16, None, 32)  # their rows and columns
# Of each benchmark: suites, tasks (all if None), episodes of each, and steps, LeRobot's own if None.
PLANS = {
    "metaworld": [
        ("easy,medium,hard,very_hard", None, 1, 8),
        ("push-v3,push-back-v3", None, 3, 8),  # which differ by 10 micrometres with what ran before
        ("faucet-open-v3,drawer-close-v3", None, 3, None),
    ],
    "libero": [("libero_goal,libero_10,libero_spatial", [0, 3], 2, 8)],
}


def steer(benchmark, state, images, step):
    """Go to one place and then to another, with a little of what the cameras show: float32 ``[A]``."""
    shown = np.concatenate([image.mean((0, 1)) for image in images])[-3:] / 255 - 0.5
    if benchmark == "metaworld":
        target, turn = ([0.0, 0.5, 0.08] if step < 40 else [0.0, 0.9, 0.05]), []
    else:
        target, turn = (
            ([-0.2, 0.0, 1.1] if step < 40 else [0.1, 0.2, 0.95]),
            0.2 * np.sin([step / 9, step / 7, step / 5]),
        )
    move = np.clip(10 * (np.array(target) - state[:3]), -1, 1) + 0.1 * shown
    return np.float32([*np.clip(move, -1, 1), *turn, -1 if step < 60 else 1])


def make_policy(benchmark, episodes):
    """Make a policy of LeRobot's that steers, and appends what it saw and did to ``episodes``."""
    import torch
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.pretrained import PreTrainedPolicy

    class Steering(PreTrainedPolicy):
        config_class, name = ACTConfig, "steering"

        def reset(self):
            episodes.append({"states": [], "actions": [], "images": [], "frames": []})

        def select_action(self, batch):
            log, step = episodes[-1], len(episodes[-1]["actions"])
            cameras = sorted(key for key in batch if key.startswith("observation.image"))
            images = [(batch[key][0] * 255).round().byte().permute(1, 2, 0).numpy() for key in cameras]
            state = batch["observation.state"][0].numpy()
            log["task"] = batch["task"][0]
            log["states"].append(state)
            log["actions"].append(steer(benchmark, state, images, step))
            log["frames"].append([zlib.crc32(np.ascontiguousarray(image).tobytes()) for image in images])
            if step % EVERY == 0:
                log["images"].append([image[COARSE, COARSE] for image in images])
            return torch.from_numpy(log["actions"][-1])[None]

        def _unused(self, *_, **__):
            raise NotImplementedError

        get_optim_params = forward = predict_action_chunk = _unused

    return Steering(ACTConfig(device="cpu"))


def record(benchmark, plan):
    """Yield the episodes of a line of a plan, each a dictionary of arrays."""
    from lerobot.envs.factory import make_env, make_env_config, make_env_pre_post_processors
    from lerobot.scripts.lerobot_eval import eval_policy
    from lerobot.utils.random_utils import set_seed

    suites, tasks, count, steps = plan
    libero = {"task_ids": tasks, "observation_height": 256, "observation_width": 256}
    config = make_env_config(benchmark, task=suites, **(libero if benchmark == "libero" else {}))
    set_seed(1000)  # as lerobot-eval
    for suite, environments in make_env(config, n_envs=1).items():
        for environment in environments.values():
            horizon, task, episodes = environment.envs[0]._max_episode_steps, environment.envs[0].task, []
            if steps is not None:
                environment.envs[0]._max_episode_steps = steps
            policy = make_policy(benchmark, episodes)
            episodes.clear()
            before, after = make_env_pre_post_processors(env_cfg=config, policy_cfg=policy.config)
            done = eval_policy(
                environment, policy, before, after, lambda batch: batch, lambda action: action, count, start_seed=1000
            )
            environment.close()
            for log, result in zip(episodes, done["per_episode"], strict=True):
                print(suite, task, result, len(log["actions"]), flush=True)
                arrays = {name: np.array(log[name]) for name in ("states", "actions", "images", "frames")}
                numbers = {name: np.array(result[name]) for name in ("seed", "success", "sum_reward", "max_reward")}
                names = {"suite": suite, "task": task, "sentence": log["task"], "horizon": horizon}
                yield {**arrays, **numbers, **{name: np.array(value) for name, value in names.items()}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("benchmark", choices=PLANS)
    parser.add_argument("file")
    parser.add_argument("--frames", help="another file, with a digest of each frame too")
    arguments = parser.parse_args()
    every = {}
    for number, episode in enumerate(
        each for plan in PLANS[arguments.benchmark] for each in record(arguments.benchmark, plan)
    ):
        every |= {f"{number}/{name}": value for name, value in episode.items()}
        if arguments.frames:
            np.savez_compressed(arguments.frames, **every)
        np.savez_compressed(arguments.file, **{name: value for name, value in every.items() if "/frames" not in name})


if __name__ == "__main__":
    main()
