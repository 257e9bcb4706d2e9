"""RoboTwin behind the :class:`~vla_envs.simulator.ChunkSimulator` protocol: a chunk of actions is one motion."""

from itertools import islice

import numpy as np

from vla_envs.rendering.vulkan import check_driver, check_gpus
from vla_envs.robotwin.expert import Expert
from vla_envs.robotwin.package import CHECKOUT, check_packages, find_assets
from vla_envs.robotwin.seeds import candidates_of
from vla_envs.robotwin.world import UnstableEpisode, World
from vla_envs.simulator import Episode, Observation, Outcome, SimulatorSpec

STOOD = "an arm stood still in a chunk: there is no time-optimal motion through its joint positions"
_TABLE = np.array([0, 0, 0.74])  # m, its middle
MOST_REPLACEMENTS = 20  # of a seed whose objects do not come to rest, by the next one


class RoboTwinSimulator:
    """One world; an episode sets its task up again (0.1 s). When it is solved, the world stands still."""

    def __init__(self, spec: SimulatorSpec):
        options = spec.options
        self.spec = spec
        assets = find_assets(options["assets_path"], options["path"])
        self.world = World(CHECKOUT.find(options["path"]), assets, options, wrist=spec.wrist_image_shape is not None)
        self.seed = -1  # RoboTwin's, of the running episode: a later one than named if that is unstable
        self.remark = ""
        self._left = 0  # actions until the task's limit
        self._solved = False

    @staticmethod
    def check(spec: SimulatorSpec) -> None:
        options = spec.options
        arms = [name for name in options["embodiment"] if isinstance(name, str)]
        check_packages(options["path"], options["assets_path"], [task.name for task in spec.tasks], arms)
        check_driver()

    check_gpus = staticmethod(lambda spec, gpus: check_gpus(gpus))

    def reset(self, episode: Episode) -> None:
        """Set the task up with the seed that the trial names; ``episode.seed`` decides nothing."""
        name = self.spec.task_of(episode).name
        candidates = candidates_of(name, self.spec.options["seeds"], episode.trial_id)
        named, *_ = seeds = list(islice(candidates, 1 + MOST_REPLACEMENTS))
        for seed in seeds:
            try:
                self.world.reset(name, seed)
                break
            except UnstableEpisode as error:
                reason = error
        else:
            raise RuntimeError(f"RoboTwin's {name} is unstable with each of the seeds {named} to {seed}: {reason}")
        replaced = [] if seed == named else [f"RoboTwin's seed {named} is unstable, {seed} runs in its place"]
        self.remark = "; ".join([*replaced, *self.world.untouchable])
        self.seed, self._left, self._solved = seed, self.spec.options["limits"][name], False

    def perturb(self, kind: str, strength: float, random: np.random.Generator) -> None:
        from vla_envs.rendering import sapien_look

        sapien_look.perturb(kind, self.world.head_camera, self.world.task.scene, _TABLE, strength, random)

    def execute(self, chunk: np.ndarray) -> list[Outcome]:
        chunk = chunk[: max(self._left, 1)]
        solved_in = 0 if self._solved else self.world.execute(chunk)
        if self.world.stood and STOOD not in self.remark:
            self.remark = "; ".join(filter(None, [self.remark, STOOD]))
        self._left -= len(chunk)
        self._solved = solved_in is not None
        first = len(chunk) if solved_in is None else solved_in
        outcomes = [Outcome(float(number >= first), success=number >= first) for number in range(len(chunk))]
        outcomes[-1].ends_episode = self._left <= 0
        return outcomes

    def observe(self) -> Observation:
        images, wrist = self.world.render()
        return Observation(
            images=images,
            states=self.world.states().astype(np.float32),
            task_description=self.world.instruction,
            wrist_images=wrist,
        )

    def close(self) -> None:
        self.world.close()


class ExpertSimulator(RoboTwinSimulator):
    """Tasks for each of which there is a scripted expert."""

    _expert: Expert | None = None
    _task = ""

    def reset(self, episode: Episode) -> None:
        super().reset(episode)
        self._expert, self._task = None, self.spec.task_of(episode).name

    def expert_chunk(self, length: int) -> np.ndarray | None:
        """Ask the scripted expert for a chunk, float64 ``[C, 14]``; ``None`` if an arm cannot reach."""
        if self._expert is None:
            self._expert = Expert(self.world, self._task)
        return self._expert.chunk(length)
