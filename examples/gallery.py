"""A GIF of each benchmark, by its scripted expert or slow waves of each joint: ``python examples/gallery.py libero``.

Assets are found as for any run (docs/environments.md). It writes into docs/gallery, which docs/gallery.md shows.
"""

import itertools
import sys

import numpy as np
from PIL import Image, ImageOps

from vla_envs import Episode, make_spec

SIDE, COLOURS, FRAMES_PER_SECOND = 256, 255, 10  # pixels of the longer side
CLIPS = {  # by name: the environment, its options, frames, and actions between them
    "metaworld": ("metaworld/assembly-v3", {"image_size": SIDE}, 40, 3),
    "libero": ("libero/goal", {}, 40, 2),
    "maniskill": ("maniskill/PutOnPlateInScene25Main-v3", {}, 30, 1),
    "calvin": ("calvin/move_slider_left", {"renderer": "tiny"}, 40, 1),
    "robotwin": ("robotwin/turn_switch", {"task_config": "demo_randomized", "collect_wrist_camera": False}, 30, 1),
}


def actions(simulator):
    """Yield what the robot does: the expert's actions, or a slow wave in each dimension."""
    while hasattr(simulator, "expert_chunk"):
        yield from simulator.expert_chunk(20)[:, None]  # chunks of one position each
    while hasattr(simulator, "expert_action"):
        yield simulator.expert_action()
    for time in itertools.count():  # within the bounds -1 to 1
        yield 0.5 * np.sin(time / 12 + np.arange(simulator.spec.action_dim, dtype=np.float32))


def film(name, options, frames, between):
    """Run an episode, and some actions beyond its success; returns pictures."""
    simulator = make_spec(name, **options).make()
    simulator.reset(Episode(task_id=0, trial_id=0))
    act, moves = getattr(simulator, "execute", None) or simulator.step, actions(simulator)
    pictures = []
    for number in range(frames * between):
        if number % between == 0:
            pictures.append(ImageOps.contain(Image.fromarray(simulator.observe().images), (SIDE, SIDE)))
        act(next(moves))
    print(f"{name}: {simulator.observe().task_description}")
    simulator.close()
    return pictures


if __name__ == "__main__":
    for clip in sys.argv[1:] or CLIPS:
        shots = film(*CLIPS[clip])
        # One palette for all and no dither: what rests costs nothing.
        palette = shots[len(shots) // 2].quantize(COLOURS, method=Image.Quantize.FASTOCTREE)
        first, *others = [shot.quantize(palette=palette, dither=Image.Dither.NONE) for shot in shots]
        how = {"save_all": True, "loop": 0, "duration": 1000 // FRAMES_PER_SECOND, "optimize": True}
        first.save(f"docs/gallery/{clip}.gif", append_images=others, **how)
