"""What a policy is shown instead, to find out what it uses, and the policy that does nothing.

Each ablation is an ``observe`` of :func:`~vla_algos.evaluate`.

An ``observe`` gets the policy's inputs, batch ``[N]``, with ``episode_index`` (the place among the evaluated episodes,
-1 where there is none) and ``decision_index`` (0 in an episode's first decision), and returns what the policy sees.
"""

import io
import math
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tensordict import NonTensorStack, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from vla_algos import distributed
from vla_algos.samples import CAMERAS
from vla_common.keys import ACTION, DECISION_INDEX, EPISODE_INDEX, IMAGES, STATES, TASK_DESCRIPTIONS, WRIST_IMAGES
from vla_common.schema import get_schema
from vla_common.texts import encode, to_strings
from vla_envs.simulator import Episode, SimulatorSpec, Task

Observe = Callable[[TensorDictBase], TensorDictBase]
_FOLDER = ".seen_images"


def _of_pictures(change: Callable[[np.ndarray], np.ndarray], what: str) -> Observe:
    """Make an ablation of a function of pictures uint8 ``[K, H, W, 3]``."""

    def observe(td: TensorDictBase) -> TensorDictBase:
        for key in CAMERAS:
            if (images := td.get(key, None)) is not None:
                flat = images.flatten(0, -4).cpu().numpy()
                td[key] = torch.from_numpy(np.ascontiguousarray(change(flat))).view(images.shape).to(images.device)
        return td

    observe.__doc__ = f"Ablation: the policy sees its pictures {what}."
    return observe


def _by_pillow(change: Callable[[Image.Image], Image.Image]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda images: np.stack([np.asarray(change(Image.fromarray(image))) for image in images])


def _as_jpeg(image: Image.Image) -> Image.Image:
    content = io.BytesIO()
    image.save(content, "JPEG", quality=95)
    return Image.open(content)


def _middle(image: Image.Image) -> Image.Image:
    (width, height), cut = image.size, (1 - math.sqrt(0.9)) / 2
    box = (cut * width, cut * height, (1 - cut) * width, (1 - cut) * height)
    return image.resize(image.size, Image.Resampling.BILINEAR, box)


def _once_smaller(image: Image.Image) -> Image.Image:
    size = [round(side * 7 / 8) for side in image.size]
    return image.resize(size, Image.Resampling.BILINEAR).resize(image.size, Image.Resampling.BILINEAR)


blank_images = _of_pictures(np.zeros_like, "black, which may be new to it; :meth:`SeenImages.others` shows real ones")
PICTURES: Mapping[str, Observe] = {  # what evaluation scripts do otherwise with the same pictures
    "mirrored_images": _of_pictures(lambda images: images[:, :, ::-1], "with left and right exchanged"),
    "rotated_images": _of_pictures(lambda images: images[:, ::-1, ::-1], "turned by 180 degrees"),
    "jpeg_images": _of_pictures(_by_pillow(_as_jpeg), "after JPEG of quality 95"),
    "cropped_images": _of_pictures(_by_pillow(_middle), "cut to the middle 90 % of their area, in the same size"),
    "resized_images": _of_pictures(_by_pillow(_once_smaller), "after 7/8 of their size, as 256 to 224, and back"),
}


def other_axis_angle(benchmark: str) -> Observe:
    """Ablation: rotations in ``states`` are the same ones the other way round: ``a (1 - 2 pi / |a|)``, rad.

    It is what a script has that leaves the sign of a quaternion as it comes. ``ValueError`` if no state is axis-angle.
    """
    if not (place := [i for i, name in enumerate(get_schema(benchmark).states) if "axis-angle" in name]):
        raise ValueError(f"ablation=other_axis_angle: states of {benchmark} have no axis-angle; leave it out")

    def observe(td: TensorDictBase) -> TensorDictBase:
        states = td[STATES].clone()
        turn = states[..., place]
        states[..., place] = turn * (1 - 2 * math.pi / turn.norm(dim=-1, keepdim=True).clamp(min=1e-6))
        return td.set(STATES, states)

    return observe


class DoNothing(TensorDictModuleBase):
    """Baseline: a policy that does nothing (``SimulatorSpec.neutral_action``), in chunks of so many actions.

    Some episodes are solved as they begin, or by what falls. A ``ValueError`` where a benchmark has no such action.
    """

    loss_keys = ()

    def __init__(self, spec: SimulatorSpec, chunk_size: int):
        super().__init__()
        if spec.neutral_action is None:
            raise ValueError(
                f"doing nothing is unknown in {spec.id}; have its make_spec say it: SimulatorSpec(neutral_action=...), "
                f"{spec.action_dim} numbers, or a function of the states"
            )
        self.in_keys, self.out_keys = [STATES], [ACTION]
        self._neutral, self._chunk_size = spec.neutral_action, chunk_size

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``action``, float32 ``[N, C, A]``."""
        states = tensordict[STATES]
        neutral = self._neutral
        rows: list[Any] = [neutral(row) if callable(neutral) else neutral for row in states.cpu().numpy()]
        actions = torch.as_tensor(np.stack(rows), dtype=torch.float32, device=states.device)
        return tensordict.set(ACTION, actions.unsqueeze(1).repeat(1, self._chunk_size, 1))


def swapped_instructions(tasks: Sequence[Task]) -> Observe:
    """Ablation: each instruction is replaced by that of the next of ``tasks``, in a cycle, that has other words.

    A ``ValueError`` if there is nothing to swap: tasks share one instruction, or each episode has one of its own.
    """
    if reworded := [task.name for task in tasks if task.sentence_per_episode]:
        raise ValueError(
            f"swapping instructions needs tasks with given ones; each episode of {reworded[0]} has its own; type "
            "ablation=other_trial, or null"
        )
    said: dict[str, list[str]] = {}
    for task in tasks:
        words = [*said.get(task.instruction, ()), *(task.instructions or (task.instruction,))]
        said[task.instruction] = list(dict.fromkeys(words))
    swapped = _next_words(said)
    known = {*swapped, *said, ""}  # an idle slot may have a pattern, or nothing, and keeps it

    def observe(td: TensorDictBase) -> TensorDictBase:
        shown, given = to_strings(td), td.get(TASK_DESCRIPTIONS)
        if unknown := [text for text in shown if text not in known]:
            raise ValueError(
                "swapping instructions needs those of the tasks, and the policy gets others, such as "
                f"{unknown[0]!r}; take another ablation"
            )
        texts = [swapped.get(text, text) for text in shown]
        as_bytes = isinstance(given, torch.Tensor)
        td[TASK_DESCRIPTIONS] = encode(texts, given.shape[-1]).to(given.device) if as_bytes else NonTensorStack(*texts)
        return td

    return observe


def check_reads(policy: TensorDictModuleBase, ablation: str | Sequence[str] | None) -> None:
    """Refuse (``ValueError``) other instructions for a policy that reads none."""
    if "swapped_instructions" in (ablation or ()) and TASK_DESCRIPTIONS not in policy.in_keys:
        raise ValueError("ablation=swapped_instructions: this policy reads no instructions; leave it out")


def _next_words(said: dict[str, list[str]]) -> dict[str, str]:
    """Return another task's words for each text, of ``said`` by instruction: the next one's with another meaning."""
    own: dict[str, set[str]] = {}  # all texts with the same meaning
    for words in said.values():
        for text in words:
            own.setdefault(text, set()).update(words)
    swapped: dict[str, str] = {}
    for place, words in enumerate(said.values()):
        following = [*said.values()][place + 1 :] + [*said.values()][:place]
        for number, text in enumerate(words):
            others = (other[number % len(other)] for other in following)
            if (chosen := next((other for other in others if other not in own[text]), None)) is None:
                raise ValueError(
                    f"swapping instructions needs tasks with at least 2 different ones, got {[*said]}; "
                    "evaluate an environment with several tasks, each of which is an episode"
                )
            swapped.setdefault(text, chosen)
    return swapped


class SeenImages:
    """Images of all cameras that a policy has seen in an evaluation, for another one in which it sees those of others.

    They are in ``folder``, which all processes reach, as observed, a file per decision; leaving the context removes it.

    Example:
        >>> with SeenImages(folder) as seen:  # doctest: +SKIP
        ...     normal = evaluate(env, policy, episodes, observe=seen.keep)
        ...     donors = other_trials(episodes, env.simulator_spec.tasks)
        ...     ablated = evaluate(env, policy, episodes, observe=seen.others(donors))
    """

    def __init__(self, folder: Path):
        self._folder = folder / _FOLDER
        if distributed.is_main():
            shutil.rmtree(self._folder, ignore_errors=True)  # of a process that was killed
        distributed.barrier()
        self._folder.mkdir(exist_ok=True)
        self._decisions: dict[int, int] = {}  # how many there are of an episode, here and, once joined, elsewhere

    def __enter__(self) -> "SeenImages":
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if distributed.is_main() or failed is not None:  # what others read is read
            shutil.rmtree(self._folder, ignore_errors=True)

    def check_room(self, spec: SimulatorSpec, episodes: int, chunk_size: int) -> None:
        """Refuse (``OSError``), before any work, so many episodes that the disk has no room for their images."""
        pixels = math.prod(spec.image_shape) + math.prod(spec.wrist_image_shape or (0,))
        decisions = episodes * -(-spec.max_episode_steps // chunk_size)
        needed, free = 3 * pixels * decisions, shutil.disk_usage(self._folder).free
        if needed > free:
            raise OSError(
                f"other_trial keeps the images of all decisions in {self._folder}, up to {needed / 1e9:.1f} GB, and "
                f"there are {free / 1e9:.1f} GB free; take a folder with more (hydra.run.dir=...), or fewer eval.trials"
            )

    def keep(self, td: TensorDictBase) -> TensorDictBase:
        """Keep what the policy sees in every decision: an ``observe``; ``ValueError`` if it sees no images."""
        images = {key: td[key].cpu().numpy() for key in CAMERAS if key in td}
        if not images:
            raise ValueError(f"the policy reads neither {IMAGES!r} nor {WRIST_IMAGES!r}: there is nothing to look at")
        for row, (episode, decision) in enumerate(_places(td)):
            if episode >= 0:
                np.savez(self._file(episode, decision), **{key: array[row] for key, array in images.items()})
                self._decisions[episode] = decision + 1  # fewer than there were, after an attempt that crashed
        return td

    def join(self) -> set[int]:
        """Have all processes see the images of all of them; returns the episodes of which there are some."""
        for each in distributed.all_gather_object(self._decisions):
            self._decisions |= each
        return set(self._decisions)

    def others(self, donors: Sequence[int]) -> Observe:
        """Ablation: the policy sees the images of another episode at the same decision; its last ones once it is over.

        State and instruction stay its own. ``donors`` are the other episodes, see :func:`other_trials`. All processes
        call it, since it calls :meth:`join`.
        """
        self.join()

        def observe(td: TensorDictBase) -> TensorDictBase:
            shown = {key: td[key].clone() for key in CAMERAS if key in td}
            for row, (episode, decision) in enumerate(_places(td)):
                if episode >= 0:
                    donor = donors[episode]
                    with np.load(self._file(donor, min(decision, self._decisions[donor] - 1))) as images:
                        for key in shown:
                            shown[key][row] = torch.from_numpy(images[key])
            return td.update(shown)

        return observe

    def _file(self, episode: int, decision: int) -> Path:
        return self._folder / f"{episode}_{decision}.npz"


def _places(td: TensorDictBase) -> Iterator[tuple[int, int]]:
    return zip(td[EPISODE_INDEX].tolist(), td[DECISION_INDEX].tolist(), strict=True)


def other_trials(
    episodes: Sequence[Episode],
    tasks: Sequence[Task],
    usable: Container[int] | None = None,
    needed: Container[int] | None = None,
) -> list[int]:
    """Choose for each episode one of another trial of the same task: the next trial, after the last one the first.

    Of a trial that runs several times the second run gets the next one's second, and so on. The index of the other
    episode is returned, by that of an episode; -1 where none is needed. ``usable`` are indices to choose from, such as
    those of episodes that have not crashed, ``needed`` those of the episodes that need another one; ``None`` for all.
    ValueError: a task has no other trial.
    """
    runs: dict[int, dict[tuple[int, int], list[int]]] = {}  # by task and trial
    for index, episode in enumerate(episodes):
        runs.setdefault(episode.task_id, {}).setdefault((episode.trial_id, episode.seed), []).append(index)
    donors = [-1] * len(episodes)
    needed, usable = (range(len(episodes)) if some is None else some for some in (needed, usable))
    for task_id, trials in runs.items():
        in_order = list(trials.values())
        for place, own in enumerate(in_order):
            following = [*in_order[place + 1 :], *in_order[:place]]
            for run, index in enumerate(own):
                if index not in needed:
                    continue
                candidates = (other[run % len(other)] for other in following)
                donors[index] = next((each for each in candidates if each in usable), -1)
                if donors[index] < 0:
                    what = "one trial only" if not following else "no other trial with a result"
                    raise ValueError(
                        f"other_trial shows the images of another trial of the same task, and {tasks[task_id].name} "
                        f"has {what}; type eval.trials=2 or more"
                    )
    return donors
