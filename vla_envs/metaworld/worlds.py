"""Built worlds of Meta-World, and those of them that wait for their next episode."""

from typing import Any

import numpy as np

from vla_envs.metaworld.spec import PROTOCOLS
from vla_envs.rendering.mujoco import Look as Look
from vla_envs.rendering.mujoco import Renderer, mujoco, shared_renderer
from vla_envs.simulator import SimulatorSpec
from vla_envs.worlds import WorldCache

# MB of a renderer, which the worlds of one model file share; measured at the benchmark's size, most of it textures.
_RENDERER = {"benchmark": 90, "fast": 42, "minimal": 42, "coarse": 5}


class World:
    """One task's world: Meta-World's own environment and what draws it. A reset leaves nothing of earlier episodes."""

    def __init__(self, name: str, spec: SimulatorSpec):
        options, protocol = spec.options, PROTOCOLS[spec.options["protocol"]]
        self.key = _key(name, spec)
        self.env = _build(name, options["reset_ranges"].get(name))
        if protocol.position:
            self.env.model.camera(protocol.camera).pos = protocol.position
        self.renderer: Renderer = shared_renderer(
            self.env.model_name,
            self.env.model,
            size=spec.image_shape,
            quality=options["render_quality"],
            # Meta-World's cameras hang upside down, so that images are turned by 180 degrees.
            cameras=[protocol.camera if options["camera"] is None else options["camera"]],
            upside_down=options["camera"] is None,
            hide_sites=options["hide_goals"],
        )
        self.renderer_megabytes = _RENDERER[options["render_quality"]]

    @property
    def megabytes(self) -> float:
        """About what it takes, without its renderer."""
        return 1.2 * (mujoco.mj_sizeModel(self.env.model) + self.env.data.nbuffer) / 1e6

    def close(self) -> None:
        """Let go of what Meta-World holds; the renderer goes with its last world."""
        self.env.close()


def _key(name: str, spec: SimulatorSpec) -> str:
    """Name what a world is built and drawn by; what happens in it belongs to the simulator."""
    drawn = {option: spec.options[option] for option in ("protocol", "render_quality", "camera", "hide_goals")}
    return repr((name, spec.options["reset_ranges"].get(name), spec.image_shape, drawn))


world_cache = WorldCache(World, _key)


def _build(name: str, reset_range: Any) -> Any:
    from gymnasium.spaces import Box
    from metaworld.env_dict import ENV_CLS_MAP

    env = ENV_CLS_MAP[name]()
    env._set_task_called = True  # in place of set_task(), which replays one of 50 drawn vectors
    env.seeded_rand_vec = True
    if reset_range is not None:
        low, high = (np.array(bound) for bound in reset_range)
        usual: Any = env._random_reset_space
        if low.shape != usual.shape or high.shape != usual.shape:
            raise ValueError(
                f"reset_ranges of {name} needs {usual.shape[0]} numbers per bound, got {low.size} and {high.size}; "
                f"the benchmark's are {usual.low.tolist()} and {usual.high.tolist()}"
            )
        env._random_reset_space = Box(low, high, dtype=np.float64)
    return env
