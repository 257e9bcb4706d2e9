"""Episodes that are harder to see, to read and to begin, each paired with its clean twin: ``stress`` of an environment.

What is drawn depends on the episode and the kind alone, and grows with the strength: of a stronger one every change is
larger. Conditions of success are the benchmark's own. Strength 0 is the episode itself, to the bit.
"""

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from vla_common import keys
from vla_common.settings import Fraction, checked
from vla_envs.simulator import Episode, Observation, Outcome, Perturbation, Simulator, SimulatorSpec, Task

Kind = Literal[Perturbation, "noise", "wording"]
KINDS: tuple[Kind, ...] = get_args(Kind)
GENERIC = ("noise", "wording")  # that need nothing of a benchmark
NOISE = 50.0  # standard deviation at strength 1, of 255
# Of a camera at strength 1, at most: rad around what it looks at, up or down and sideways each; rad about its own axis;
# shares of its distance and of its view, by which it is nearer and looks past.
ORBIT, ROLL, NEARER, PAN = np.radians(10.0), np.radians(5.0), 0.1, 0.1
# Of the light at strength 1, at most: factors of it and of each of its colours, rad about the vertical.
BRIGHTER, TINT, AROUND = 3.0, 0.2, np.radians(60.0)
REACH = 0.06  # m; how far the hand begins from its usual start, at most, at strength 1
_ATTEMPTS = 20  # to begin where the task is not solved

_FRAMES = ("please {}", "could you {}?", "I want you to {}", "your task is to {}", "{}, please")
_LIST = """pick up: grab/take, turn on: switch on, turn off: switch off, go to: reach, bypass: go around/avoid,
close: shut, get: fetch, grasp: grab/take hold of, insert: stick, into: in, lift: raise, move: shift, onto: on,
open: open up, pick: take, place: put/set, press: push on, pull: tug, push: shove, put: place/set,
reach: go to/move to, rotate: turn, slide: move, stack: pile, sweep: brush, take: get"""
_SYNONYMS = {phrase: tuple(ways.split("/")) for phrase, ways in re.findall(r"(\w[\w ]*): ([\w/ ]+)", _LIST)}
_PHRASE = re.compile(rf"\b({'|'.join(_SYNONYMS)})\b(?! to\b)", re.IGNORECASE)


@checked
def stressed(spec: SimulatorSpec, stress: Mapping[Kind, Fraction] | None) -> SimulatorSpec:
    """Describe the same environment with its episodes under stress.

    Args:
        spec: the clean one; ``spec.perturbs`` says which kinds there are beside ``noise`` and ``wording``.
        stress: strengths by kind, 0 to 1; nothing changes where all are 0.

    Raises:
        ValueError: a kind that the benchmark does not have, or a strength that is none.
    """
    strengths: dict[str, float] = {kind: float(stress[kind]) for kind in KINDS if stress and stress.get(kind)}
    known = [kind for kind in KINDS if kind in (*GENERIC, *spec.perturbs)]
    if missing := [kind for kind in strengths if kind not in known]:
        raise ValueError(f"{spec.id} has no stress by {missing[0]}; it has {', '.join(known)}")
    if not strengths:
        return spec
    if spec.batched:
        raise ValueError(f"stress: worlds of {spec.id} that are simulated together have none; type backend=processes")
    said = f"stress: {', '.join(f'{kind} {strength:g}' for kind, strength in strengths.items())}"
    tasks = tuple(map(_reworded_task, spec.tasks)) if "wording" in strengths else spec.tasks
    return replace(spec, stress=strengths, tasks=tasks, protocol_deviations=(*spec.protocol_deviations, said))


class Stressed:
    """A simulator whose episodes are under the stress of its ``spec``; the rest is the simulator's own."""

    def __init__(self, simulator: Simulator):
        self._simulator, self.spec = simulator, simulator.spec
        self._identity: list[int] = []  # of the running episode
        self._elapsed = 0  # actions
        if hasattr(simulator, "execute"):
            self.execute = self._execute

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_simulator"], name)

    def reset(self, episode: Episode) -> None:
        """Begin an episode, again from another start where the first one solves the task."""
        name = zlib.crc32(self.spec.task_of(episode).name.encode())  # the same in every suite
        self._identity, self._elapsed = [episode.seed, name, episode.trial_id], 0
        start = self._draw("start")
        for _ in range(_ATTEMPTS):
            self._simulator.reset(episode)
            if self._perturb("start", start):
                break
        else:
            raise RuntimeError(f"{self.spec.describe(episode)} is solved at each of {_ATTEMPTS} starts")
        for kind in KINDS[1:]:
            if kind not in GENERIC:
                self._perturb(kind, self._draw(kind))

    def step(self, action: np.ndarray) -> Outcome:
        """Execute a primitive action."""
        self._elapsed += 1
        return self._simulator.step(action)

    def _execute(self, chunk: np.ndarray) -> Any:
        self._elapsed += len(chunk)
        return self._simulator.execute(chunk)  # type: ignore[attr-defined]

    def observe(self) -> Observation:
        """Render, the same as often as it is asked for."""
        seen, stress = self._simulator.observe(), self.spec.stress
        if strength := stress.get("noise"):
            random = self._draw("noise", self._elapsed)
            seen.images = noisy(seen.images, strength, random)
            if seen.wrist_images is not None:
                seen.wrist_images = noisy(seen.wrist_images, strength, random)
        if strength := stress.get("wording"):
            said = zlib.crc32(seen.task_description.encode())  # a chain has several in an episode
            seen.task_description = reworded(seen.task_description, strength, self._draw("wording", said))
        return seen

    def _draw(self, kind: Kind, *further: int) -> np.random.Generator:
        return np.random.default_rng([*self._identity, KINDS.index(kind), *further])

    def _perturb(self, kind: Kind, random: np.random.Generator) -> bool:
        strength = self.spec.stress.get(kind)
        return not strength or self._simulator.perturb(kind, strength, random) is not False  # type: ignore[attr-defined]


def noisy(images: np.ndarray, strength: float, random: np.random.Generator) -> np.ndarray:
    """Add independent normal noise to each number of uint8 images of any shape."""
    noise = random.standard_normal(images.shape, np.float32)
    return np.clip(np.rint(images + strength * NOISE * noise), 0, 255).astype(np.uint8)


def reworded(instruction: str, strength: float, random: np.random.Generator) -> str:
    """Say it in other words: each phrase that has a synonym, and the form of the sentence, with that probability.

    A sentence that would be longer than instructions may be stays as it is.
    """

    def swap(synonyms: tuple[str, ...]) -> str | None:
        changed, chosen = random.random() < strength, synonyms[random.integers(len(synonyms))]
        return chosen if changed else None

    return _reword(instruction, swap)


def _reword(instruction: str, swap: Callable[[tuple[str, ...]], str | None]) -> str:
    frame = swap(_FRAMES)
    text = _PHRASE.sub(lambda found: swap(_SYNONYMS[found[1].lower()]) or found[1], instruction)
    text = text[:1].lower() + text[1:].rstrip(".!?") if frame else text
    text = (frame or "{}").replace("{}", text)
    text = text[:1].upper() + text[1:] if instruction[:1].isupper() else text
    return text if len(text.encode()) <= keys.MAX_INSTRUCTION else instruction


def _reworded_task(task: Task) -> Task:
    """Declare the longest sentences that a task may have, which policies check before any work."""
    known = task.instructions or (task.instruction,)
    longest = (_reword(text, lambda ways: max(ways, key=len)) for text in known)
    return replace(task, instructions=(*known, *longest), sentence_per_episode=True)


def camera_motion(draw: np.ndarray, distance: float, view: float) -> np.ndarray:
    """Return where a camera hangs, in its usual axes (right, up, back): float64 ``[4, 4]``, m.

    ``draw``: six numbers of -1 to 1; ``distance``: to what it looks at, m, around which it moves; ``view``: rad.
    """
    up_down, sideways, nearer, roll, pan, tilt = draw
    orbit, turned, there, back = np.eye(4)[None].repeat(4, 0)
    orbit[:3, :3] = rotation(ORBIT * up_down, ORBIT * sideways, 0)
    turned[:3, :3] = rotation(PAN * view * tilt, PAN * view * pan, ROLL * roll)
    there[2, 3], back[2, 3] = -distance, distance * (1 + NEARER * nearer)
    return there @ orbit @ back @ turned


def light_change(strength: float, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw factors of red, green and blue, float64 ``[3]``, and how lights turn about the vertical, ``[3, 3]``."""
    brightness, turn, *tint = strength * random.uniform(-1, 1, 5)
    return BRIGHTER**brightness * (1 + TINT * np.array(tint)), rotation(0, 0, AROUND * turn)


def rotation(x: float, y: float, z: float) -> np.ndarray:
    """Return the matrix ``[3, 3]`` of a rotation vector, rad, by Rodrigues' formula."""
    angle, cross = np.linalg.norm([x, y, z]), np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sinc(angle / np.pi) * cross + 0.5 * np.sinc(angle / 2 / np.pi) ** 2 * cross @ cross


def hand_way(strength: float, random: np.random.Generator) -> np.ndarray:
    """Draw how far the hand is from its usual start, m, float64 ``[3]``: evenly in the upper half of a ball."""
    way = random.standard_normal(3)
    way[2] = abs(way[2])
    return way * strength * REACH * random.random() ** (1 / 3) / np.linalg.norm(way)
