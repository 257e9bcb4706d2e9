"""What evaluate.py does: an evaluation as it is, and again with each ablation; one that is resumed has its weights."""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from vla_algos import ablations, distributed
from vla_algos.evaluation import EvaluationResult
from vla_algos.files import write_atomically
from vla_algos.results import IDENTITY, NAME, files_of, finished_episodes
from vla_algos.run.comparing import ablated_file
from vla_algos.run.evaluator import Evaluator
from vla_algos.run.run import Run
from vla_algos.run.seeds import random_state, seed_rank, set_random_state
from vla_algos.run.videos import save_videos
from vla_common.plain import read_json
from vla_envs import SimulatorSpec, VLAEnv
from vla_envs.gym.env import frames_per_second
from vla_policies import VLAPolicy
from vla_policies.sharding import gathered

_Otherwise = Literal["mirrored_images", "rotated_images", "jpeg_images", "cropped_images", "resized_images"]
AblationName = Literal[
    "blank_images", "do_nothing", "other_trial", "swapped_instructions", _Otherwise, "other_axis_angle"
]
_WAY_OUT = "Take another folder (hydra.run.dir=...), or remove {} to begin again"


def check_weights(folder: Path, policy: nn.Module) -> None:
    """Refuse (ValueError) to resume in a folder with results of other weights; note the policy where there are none."""
    path, weights, before = folder / NAME, _fingerprint(policy), None
    if files_of(path):
        try:
            before = str(read_json(folder / IDENTITY)["policy"])
        except (OSError, ValueError, KeyError):
            raise ValueError(
                f"{path} is there, but no readable {IDENTITY} says of which policy. {_WAY_OUT.format(path)}"
            ) from None
    distributed.barrier()  # all have read what is written now
    if before not in (None, weights):
        raise ValueError(f"{folder} has results of a policy with other weights than this one. {_WAY_OUT.format(path)}")
    if distributed.is_main():
        write_atomically(folder / IDENTITY, json.dumps({"policy": weights}) + "\n")


def _fingerprint(policy: nn.Module) -> str:
    """Hash the names, shapes and sums of the bits of all weights; reads each once."""
    found = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):  # extra state
            found.update(f"{name} {tensor!r}".encode())
            continue
        flat = tensor.detach().contiguous().view(-1)
        bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64))
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {int(bits.sum(dtype=torch.int64))}".encode())
    return found.hexdigest()


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
        run, results = self.run, dict[str, EvaluationResult]()
        pipeline = {"resume": True, "record": True, "greedy": run.config.greedy, **run.config.pipeline}
        with contextlib.ExitStack() as stack:
            stack.enter_context(gathered(policy))
            seen = None
            if "other_trial" in self.names:
                seen = stack.enter_context(ablations.SeenImages(run.folder))
                seen.check_room(self.spec, len(self._episodes), policy.chunk_size)
            seed_rank(run.config.seed)
            numbers = random_state()
            for name in ["", *self.names]:  # "" is the evaluation as it is
                set_random_state(numbers)
                how = {"policy": policy, **pipeline, **self._options(name, policy.chunk_size, seen, results)}
                path = run.folder / (ablated_file(name) if name else NAME)
                title, keeps = name or "evaluation", not name
                results[name] = result = self._evaluator.run(title, env, path=path, keep_actions=keeps, **how)
                save_videos(run.folder / "videos" / name, result, frames_per_second(self.spec, env.chunk_size))
                if result.failure:
                    break
        return results

    def _options(
        self, name: str, chunk_size: int, seen: ablations.SeenImages | None, results: Mapping[str, EvaluationResult]
    ) -> dict[str, Any]:
        if seen is None or name not in ("", "other_trial"):
            return self._alone(name, chunk_size)
        file, videos = self.run.folder / ablated_file("other_trial"), range(self._evaluator.videos)  # which run again
        known = finished_episodes(file, self._episodes, self.spec.chain_length)
        left = [index for index in range(len(self._episodes)) if index not in known or index in videos]
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
