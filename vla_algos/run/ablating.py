"""An evaluation as it is, and again with each ablation: the same episodes, to be compared one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from vla_algos.ablations import DoNothing, Observe, SeenImages, blank_images, other_trials, swapped_instructions
from vla_algos.evaluation import EvaluationResult
from vla_algos.run.seeds import seed_rank
from vla_envs import Episode, SimulatorSpec

if TYPE_CHECKING:
    from vla_algos.run.run import Run

AblationName = Literal["blank_images", "do_nothing", "other_trial", "swapped_instructions"]


def check_ablations(names: Sequence[str], spec: SimulatorSpec, episodes: Sequence[Episode]) -> None:
    """Refuse before any work what cannot be.

    Raises:
        ValueError: an ablation stands there twice, tasks share one instruction, or have one trial only, or nobody has
            said what doing nothing is.
    """
    if len(set(names)) < len(names):
        raise ValueError(f"ablation=[{','.join(names)}]: one of them stands there twice; type each once")
    if "swapped_instructions" in names:
        swapped_instructions(spec.tasks)
    if "other_trial" in names:
        other_trials(episodes, spec.tasks)
    if "do_nothing" in names:
        DoNothing(spec, 1)


def evaluate_with_ablations(run: Run, names: Sequence[str], seed: int, **options: Any) -> dict[str, EvaluationResult]:
    """Evaluate as it is, then with each ablation, until one has no result; all begin with the same random numbers.

    The evaluation as it is comes first in any case: the others are compared with it, and it has the images that
    ``other_trial`` shows. Where results are in the folder already, these are not run again, but for the episodes whose
    images are still needed.

    Args:
        run: has the policy and the environment.
        names: ablations.
        seed: of sampled actions.
        **options: of :meth:`~vla_algos.run.run.Run.evaluate`.

    Returns:
        The results by the name of the ablation, of the evaluation as it is ``""``.
    """
    episodes, tasks = run.evaluator.episodes(run.spec), run.spec.tasks
    results: dict[str, EvaluationResult] = {}
    with contextlib.ExitStack() as stack:
        shown: dict[str, Callable[[], Observe]] = {
            "blank_images": lambda: blank_images,
            "swapped_instructions": lambda: swapped_instructions(tasks),
        }
        nothing: dict[str, Any] = (
            {"policy": DoNothing(run.spec, run.policy.chunk_size)} if "do_nothing" in names else {}
        )
        normal: dict[str, Any] = {}
        if "other_trial" in names:
            seen = stack.enter_context(SeenImages(run.folder))
            seen.check_room(run.spec, len(episodes), run.policy.chunk_size)
            donors = other_trials(episodes, tasks)
            normal = {"observe": seen.keep, "again": {donors[index] for index in run.unfinished("other_trial")}}

            def other_trial() -> Observe:
                finished = {result.index for result in results[""].finished}
                needed = run.unfinished("other_trial")
                return seen.others(other_trials(episodes, tasks, finished & seen.join(), needed))

            shown["other_trial"] = other_trial
        for name in ["", *names]:
            seed_rank(seed)
            how: dict[str, Any] = (
                normal if not name else nothing if name == "do_nothing" else {"observe": shown[name]()}
            )
            results[name] = run.evaluate(name, **how, **options)
            if results[name].failure:
                break
    return results
