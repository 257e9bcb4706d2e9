"""What changes a LIBERO episode: pixels and states after the reset and 20 actions later, beside the protocol's own.

python -m benchmarks.moves [--tasks 0 4 --trials 5]
"""

import argparse

import numpy as np
import torch
from tensordict import TensorDict

from vla_algos.ablations import PICTURES, other_axis_angle
from vla_common.keys import IMAGES, STATES
from vla_envs import make_spec
from vla_envs.simulator import Episode

OPTIONS = {
    "fixtures=openvla": {"fixtures": "openvla"},
    "fixtures=openpi": {"fixtures": "openpi"},
    "fixtures=simplevla": {"fixtures": "simplevla"},
    "settle_steps=0": {"settle_steps": 0},
    "settle_steps=5": {"settle_steps": 5},
    "settle_steps=15": {"settle_steps": 15},
    "reset_gripper_open=false": {"reset_gripper_open": False},
    "render_quality=fast": {"render_quality": "fast"},
}
ACTIONS = np.random.default_rng(0).uniform(-0.3, 0.3, (20, 7)).astype(np.float32)


def main() -> None:
    """Print a row for each: means over episodes of the mean and of the largest difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, nargs="+", default=[0, 4], help="of libero/spatial")
    parser.add_argument("--trials", type=int, default=5)
    chosen = parser.parse_args()
    episodes = [Episode(task, trial) for task in chosen.tasks for trial in range(chosen.trials)]
    own = seen({}, episodes)
    columns = ("pixels, mean", "largest", "states, largest", "20 actions later", "largest", "states, largest")
    print(f"{'':<26}" + "".join(f"{name:>18}" for name in columns))
    for name, options in OPTIONS.items():
        show(name, own, seen(options, episodes))
    for name, observe in {**PICTURES, "other_axis_angle": other_axis_angle("libero")}.items():
        changed = [observe(TensorDict({IMAGES: images, STATES: states}, [2])) for images, states in own]
        show(name, own, [(td[IMAGES], td[STATES]) for td in changed])


def seen(options: dict, episodes: list[Episode]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return images ``[2, H, W, 3]`` and states ``[2, S]`` of each episode: after the reset, and 20 actions later."""
    simulator, found = make_spec("libero/spatial", **options).make(), []
    for episode in episodes:
        simulator.reset(episode)
        moments = [simulator.observe()]
        moments[0].images = moments[0].images.copy()
        for action in ACTIONS:
            simulator.step(action)
        moments.append(simulator.observe())
        images, states = (np.stack([getattr(each, name) for each in moments]) for name in ("images", "states"))
        found.append((torch.from_numpy(images), torch.from_numpy(states)))
    simulator.close()
    return found


def show(name: str, own: list, other: list) -> None:
    """Print how far apart both are, pixels of 255, states in m and rad."""
    numbers = []
    for moment in (0, 1):
        pixels = [(a[moment].float() - b[moment].float()).abs() for (a, _), (b, _) in zip(own, other, strict=True)]
        states = [(a[moment] - b[moment]).abs().max() for (_, a), (_, b) in zip(own, other, strict=True)]
        numbers += [np.mean([each.mean() for each in pixels]), np.mean([each.max() for each in pixels])]
        numbers.append(np.mean(states))
    print(f"{name:<26}" + "".join(f"{value:18.4f}" for value in numbers), flush=True)


if __name__ == "__main__":
    main()
