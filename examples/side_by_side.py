"""Two policies on the same episodes, as a GIF: ``python examples/side_by_side.py BEFORE AFTER FILE.gif``.

An episode is the same however it is drawn: a decision is made from the small picture that a policy sees, and shown in
a larger one, of a second simulator that gets the same actions. It shows the first held-out episode of each task.
"""

import sys

import numpy as np
import torch
from PIL import Image
from tensordict import NonTensorStack, TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_envs import Episode, make_spec
from vla_policies import load_policy

ENV = "metaworld/door-unlock-v3+stick-push-v3+button-press-topdown-v3"  # of recipes/conf/env/metaworld_small.yaml
SEEN = {"image_size": 96, "render_quality": "coarse"}
SIDE, GAP, COLOURS, MILLISECONDS, LAST = 224, 6, 128, 100, 8  # pixels, of the palette, per picture, pictures at the end
HELD_OUT = 9_000_000  # family of initial states
DONE = np.array([60, 170, 90], dtype=np.uint8)  # of the frame around an episode that is solved


@torch.no_grad()
def episode(policy, task):
    """Pictures of one episode, framed from its success on."""
    seen, drawn = make_spec(ENV, **SEEN).make(), make_spec(ENV, image_size=SIDE, render_quality="fast").make()
    for simulator in (seen, drawn):
        simulator.reset(Episode(task_id=task, trial_id=0, seed=HELD_OUT))
    pictures, solved = [framed(drawn.observe().images, False)], False
    for _ in range(0, seen.spec.max_episode_steps, policy.chunk_size):
        observed = seen.observe()
        inputs = {"images": torch.tensor(observed.images.copy())[None], "states": torch.tensor(observed.states)[None]}
        inputs["task_descriptions"] = NonTensorStack(observed.task_description)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            chunk = policy(TensorDict(inputs, [1]))["action"][0].numpy()
        for action in chunk:
            drawn.step(action)
            if solved := seen.step(action).success:
                break
        pictures.append(framed(drawn.observe().images, solved))
        if solved:
            break
    for simulator in (seen, drawn):
        simulator.close()
    return pictures


def framed(picture, solved):
    """A picture with a green edge if the task is solved."""
    picture = picture.copy()
    if solved:
        for edge in (np.s_[:GAP], np.s_[-GAP:], np.s_[:, :GAP], np.s_[:, -GAP:]):
            picture[edge] = DONE
    return picture


def side_by_side(before, after):
    """Pictures of both, the shorter one resting at its end."""
    for number in range(max(len(before), len(after)) + LAST):
        both = [pictures[min(number, len(pictures) - 1)] for pictures in (before, after)]
        yield np.hstack([both[0], np.full((SIDE, GAP, 3), 255, dtype=np.uint8), both[1]])


if __name__ == "__main__":
    *folders, file = sys.argv[1:]
    policies = [load_policy(folder).eval() for folder in folders]
    tasks = range(len(make_spec(ENV, **SEEN).tasks))
    pairs = [[episode(policy, task) for policy in policies] for task in tasks]
    shots = [Image.fromarray(shot) for pair in pairs for shot in side_by_side(*pair)]
    palette = shots[-1].quantize(COLOURS, method=Image.Quantize.FASTOCTREE)
    first, *others = [shot.quantize(palette=palette, dither=Image.Dither.NONE) for shot in shots]
    first.save(file, save_all=True, append_images=others, loop=0, duration=MILLISECONDS, optimize=True)
