"""What evaluate.py does: an evaluation as it is, and again with each ablation."""

import contextlib
from collections.abc import Mapping
from typing import Any, Literal

from vla_algos import ablations
from vla_algos.evaluation import EvaluationResult
from vla_algos.results import NAME, finished_episodes
from vla_algos.run.comparing import ablated_file
from vla_algos.run.evaluator import Evaluator
from vla_algos.run.run import Run
from vla_algos.run.seeds import seed_rank
from vla_algos.run.videos import save_videos
from vla_envs import SimulatorSpec, VLAEnv
from vla_envs.gym.env import frames_per_second
from vla_policies import VLAPolicy
from vla_policies.sharding import gathered

_Otherwise = Literal["mirrored_images", "rotated_images", "jpeg_images", "cropped_images", "resized_images"]
AblationName = Literal[
    "blank_images", "do_nothing", "other_trial", "swapped_instructions", _Otherwise, "other_axis_angle"
]


class AblatedEvaluation:
    """An evaluation in the folder of a run, and again with each ablation; episodes that are there are not run again.

    ValueError: an ablation stands there twice, or is not possible with these tasks and episodes.
    """

    def __init__(self, run: Run, spec: SimulatorSpec):
        config = run.config
        self.run, self.spec, self._evaluator = run, spec, Evaluator(**config.eval)
        self.names = [config.ablation] if isinstance(config.ablation, str) else list(config.ablation or [])
        self._episodes = self._evaluator.episodes(spec)
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"ablation=[{','.join(self.names)}]: one of them stands there twice; type each once")
        for name in self.names:
            self._alone(name, 1)
        if "other_trial" in self.names:
            ablations.other_trials(self._episodes, spec.tasks)

    def __call__(self, env: VLAEnv, policy: VLAPolicy) -> dict[str, EvaluationResult]:
        """Evaluate as it is, then with each ablation, until one has no result; all with the same random numbers."""
        results: dict[str, EvaluationResult] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(gathered(policy))
            seen = None
            if "other_trial" in self.names:
                seen = stack.enter_context(ablations.SeenImages(self.run.folder))
                seen.check_room(self.spec, len(self._episodes), policy.chunk_size)
            for name in ["", *self.names]:  # "" is the evaluation as it is
                seed_rank(self.run.config.seed)
                options = {"policy": policy, **self._options(name, policy.chunk_size, seen, results)}
                results[name] = self._evaluate(name, env, **options)
                if results[name].failure:
                    break
        return results

    def _options(
        self, name: str, chunk_size: int, seen: ablations.SeenImages | None, results: Mapping[str, EvaluationResult]
    ) -> dict[str, Any]:
        if seen is None or name not in ("", "other_trial"):
            return self._alone(name, chunk_size)
        left = self._unfinished("other_trial")
        if name == "":
            donors = ablations.other_trials(self._episodes, self.spec.tasks)
            return {"observe": seen.keep, "again": {donors[index] for index in left}}
        usable = {result.index for result in results[""].finished} & seen.join()
        return {"observe": seen.others(ablations.other_trials(self._episodes, self.spec.tasks, usable, left))}

    def _alone(self, name: str, chunk_size: int) -> dict[str, Any]:
        """Return what an ablation changes that needs no other evaluation; ValueError if it is not possible."""
        if name == "do_nothing":
            return {"policy": ablations.DoNothing(self.spec, chunk_size)}
        if name == "swapped_instructions":
            return {"observe": ablations.swapped_instructions(self.spec.tasks)}
        if name == "other_axis_angle":
            return {"observe": ablations.other_axis_angle(self.spec.benchmark)}
        pictures = {"blank_images": ablations.blank_images, **ablations.PICTURES}
        return {"observe": pictures[name]} if name in pictures else {}

    def _evaluate(self, name: str, env: VLAEnv, **options: Any) -> EvaluationResult:
        run, evaluator = self.run, self._evaluator
        how = {"resume": True, "record": evaluator.local_videos, "greedy": run.config.greedy, **run.config.pipeline}
        path = run.folder / (ablated_file(name) if name else NAME)
        result = evaluator.run(name or "evaluation", env, path=path, keep_actions=not name, **how, **options)
        save_videos(run.folder / "videos" / name, result, frames_per_second(self.spec, env.chunk_size))
        return result

    def _unfinished(self, name: str) -> list[int]:
        """List the indices of the episodes of an ablation that have no result in the folder yet, or are filmed."""
        known = finished_episodes(self.run.folder / ablated_file(name), self._episodes, self.spec.chain_length)
        videos = range(self._evaluator.videos)  # which run again
        return [index for index in range(len(self._episodes)) if index not in known or index in videos]
