"""What a policy is shown instead, to find out what it uses, and the policy that does nothing.

Each ablation is an ``observe`` of :func:`~vla_algos.evaluate`.

An ``observe`` gets the policy's inputs, batch ``[N]``, with ``episode_index`` (the place among the evaluated episodes,
-1 where there is none) and ``decision_index`` (0 in an episode's first decision), and returns what the policy sees.
"""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tensordict import NonTensorStack, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from vla_algos import distributed
from vla_common.keys import ACTION, DECISION_INDEX, EPISODE_INDEX, IMAGES, STATES, TASK_DESCRIPTIONS, WRIST_IMAGES
from vla_common.schema import get_schema
from vla_common.texts import encode, to_strings
from vla_envs.simulator import Episode, SimulatorSpec, Task

Observe = Callable[[TensorDictBase], TensorDictBase]
_FILE = ".seen_images_rank"


def blank_images(td: TensorDictBase) -> TensorDictBase:
    """Ablation: the policy sees black pictures, which may be new to it; :meth:`SeenImages.others` shows real ones."""
    for key in (IMAGES, WRIST_IMAGES):
        if (images := td.get(key, None)) is not None:
            td[key] = torch.zeros_like(images)
    return td


def _of_pictures(change: Callable[[np.ndarray], np.ndarray], what: str) -> Observe:
    """Make an ablation of a function of pictures uint8 ``[K, H, W, 3]``."""

    def observe(td: TensorDictBase) -> TensorDictBase:
        for key in (IMAGES, WRIST_IMAGES):
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


PICTURES: Mapping[str, Observe] = {  # what evaluation scripts do otherwise with the same pictures
    "mirrored_images": _of_pictures(lambda images: images[:, :, ::-1], "with left and right exchanged"),
    "rotated_images": _of_pictures(lambda images: images[:, ::-1, ::-1], "turned by 180 degrees"),
    "jpeg_images": _of_pictures(_by_pillow(_as_jpeg), "after JPEG of quality 95"),
    "cropped_images": _of_pictures(_by_pillow(_middle), "cut to the middle 90 % of their area, in the same size"),
    "resized_images": _of_pictures(_by_pillow(_once_smaller), "after 7/8 of their size, as 256 to 224, and back"),
}


def other_axis_angle(benchmark: str) -> Observe:
    """Ablation: rotations in ``states`` are the same ones the other way round: ``a (1 - 2 pi / |a|)``, rad.

    It is what a script has that leaves the sign of a quaternion as it comes. A ``ValueError`` if the benchmark's states
    have no axis-angle.
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

    Some episodes are solved as they begin, or by what falls. A ``ValueError`` where a benchmark does not say what doing
    nothing is.
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

    They are in ``folder``, a file of each process, which all have to reach: as observed, uint8. As a context manager
    it removes the file.

    Example:
        >>> with SeenImages(folder) as seen:  # doctest: +SKIP
        ...     normal = evaluate(env, policy, episodes, observe=seen.keep)
        ...     donors = other_trials(episodes, env.simulator_spec.tasks)
        ...     ablated = evaluate(env, policy, episodes, observe=seen.others(donors))
    """

    def __init__(self, folder: Path):
        self._folder, self._path = folder, folder / f"{_FILE}{distributed.rank()}"
        self._file = open(self._path, "wb")  # noqa: SIM115 as long as this is
        self._decisions: dict[int, list[int]] = {}  # by episode, the place in the file of each
        self._kept = 0
        self._shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {}  # by key
        self._all: dict[int, tuple[int, list[int]]] = {}  # by episode of any process: its rank, and places in its file
        self._images: list[np.ndarray | None] = []  # of each process, uint8 [decisions, bytes of all cameras]

    def __enter__(self) -> SeenImages:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        self._file.close()
        self._images.clear()
        self._path.unlink(missing_ok=True)
        if distributed.is_main() and failed is None:  # what others read is read, and what killed ones left can go
            for path in self._folder.glob(f"{_FILE}*"):
                path.unlink(missing_ok=True)

    def check_room(self, spec: SimulatorSpec, episodes: int, chunk_size: int) -> None:
        """Refuse (``ValueError``), before any work, so many episodes that the disk has no room for their images."""
        pixels = math.prod(spec.image_shape) + math.prod(spec.wrist_image_shape or (0,))
        decisions = episodes * -(-spec.max_episode_steps // chunk_size)
        needed, free = 3 * pixels * decisions, shutil.disk_usage(self._folder).free
        if needed > free:
            raise ValueError(
                f"other_trial keeps the images of all decisions in {self._folder}, up to {needed / 1e9:.1f} GB, and "
                f"there are {free / 1e9:.1f} GB free; take a folder with more (hydra.run.dir=...), or fewer eval.trials"
            )

    def keep(self, td: TensorDictBase) -> TensorDictBase:
        """Keep what the policy sees in every decision: an ``observe``; ``ValueError`` if it sees no images."""
        rows = (td[EPISODE_INDEX] >= 0).nonzero().flatten()
        images = {key: td[key][rows].cpu().numpy() for key in (IMAGES, WRIST_IMAGES) if key in td}
        if not images:
            raise ValueError(f"the policy reads neither {IMAGES!r} nor {WRIST_IMAGES!r}: there is nothing to look at")
        self._shapes = {key: (array.shape[1:], array.dtype) for key, array in images.items()}
        whole = [np.ascontiguousarray(array).reshape(len(rows), -1).view(np.uint8) for array in images.values()]
        self._file.write(np.concatenate(whole, 1).tobytes())
        episodes, decisions = td[EPISODE_INDEX][rows].tolist(), td[DECISION_INDEX][rows].tolist()
        for episode, decision, place in zip(episodes, decisions, count(self._kept)):
            del self._decisions.setdefault(episode, [])[decision:]  # of an attempt that crashed
            self._decisions[episode].append(place)
        self._kept += len(rows)
        return td

    def join(self) -> set[int]:
        """Have all processes see the images of all of them; returns the episodes of which there are some."""
        self._file.close()
        self._images.clear()
        self._all.clear()
        everything = distributed.all_gather_object((self._path, self._kept, self._shapes, self._decisions))
        for rank, (path, kept, shapes, decisions) in enumerate(everything):
            self._shapes = self._shapes or shapes
            self._images.append(np.memmap(path, np.uint8, "r").reshape(kept, -1) if kept else None)
            self._all |= {episode: (rank, places) for episode, places in decisions.items()}
        return set(self._all)

    def others(self, donors: Sequence[int]) -> Observe:
        """Ablation: the policy sees the images of another episode at the same decision; its last ones once it is over.

        State and instruction stay its own. ``donors`` are the other episodes, see :func:`other_trials`. Calls
        :meth:`join`, as all processes do, if that has not been.
        """
        if not self._all:
            self.join()

        def observe(td: TensorDictBase) -> TensorDictBase:
            shown = {key: td[key].clone() for key in self._shapes}
            places = zip(td[EPISODE_INDEX].tolist(), td[DECISION_INDEX].tolist(), strict=True)
            for row, (episode, decision) in enumerate(places):
                if episode >= 0:
                    for key, image in self._read(donors[episode], decision).items():
                        shown[key][row] = torch.from_numpy(image)
            return td.update(shown)

        return observe

    def _read(self, episode: int, decision: int) -> dict[str, np.ndarray]:
        rank, places = self._all[episode]
        images = self._images[rank]
        assert images is not None  # it has places
        data, found, begin = images[places[min(decision, len(places) - 1)]], {}, 0
        for key, (shape, dtype) in self._shapes.items():
            end = begin + math.prod(shape) * dtype.itemsize
            found[key] = np.array(data[begin:end]).view(dtype).reshape(shape)
            begin = end
        return found


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
