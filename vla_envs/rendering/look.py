"""What of a MuJoCo world is drawn otherwise than it is simulated: camera, light, and things that nothing touches."""

from __future__ import annotations

from typing import NamedTuple

import mujoco
import numpy as np

from vla_envs.stress import camera_motion

_BRIGHTER = 3.0  # at most, at strength 1; or that much darker
_TINT = 0.2  # of each colour
_AROUND = np.radians(60.0)  # that lights move about the vertical
_THINGS = 8
_CANDIDATES = 400
_AWAY = 0.06  # m that a thing keeps from the middle of a site, such as a goal, beside its own size
_SHAPES = [mujoco.mjtGeom.mjGEOM_BOX, mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_CYLINDER]


class Thing(NamedTuple):
    """A coloured body that stands somewhere, as MuJoCo's scene takes it."""

    shape: int
    size: np.ndarray
    position: np.ndarray
    axes: np.ndarray
    color: np.ndarray


class Look:
    """How an episode looks; ``area`` are the lowest and highest x and y, m, between which things may stand."""

    def __init__(self, area: tuple[tuple[float, float], tuple[float, float]]):
        self._area = area
        self.camera: np.ndarray | None = None
        self._brightness, self._around = np.ones(3), 0.0
        self._things: list[Thing] = []

    def draw(
        self, kind: str, strength: float, random: np.random.Generator, model: mujoco.MjModel, data: mujoco.MjData
    ) -> None:
        """Draw one kind of stress for the world as it is."""
        if kind == "camera":
            self.camera = camera_motion(strength, random)
        elif kind == "light":
            brightness, around, tint = np.split(strength * random.uniform(-1, 1, 5), [1, 2])
            self._brightness, self._around = _BRIGHTER**brightness * (1 + _TINT * tint), float(_AROUND * around[0])
        else:
            self._things = _things(int(np.ceil(_THINGS * strength)), random, self._area, model, data)

    def apply(self, scene: mujoco.MjvScene, middle: np.ndarray, first_camera: bool) -> None:
        """Change what is about to be drawn; lights move around ``middle``."""
        if self.camera is not None and first_camera:
            for eye in scene.camera:
                axes = np.stack([np.cross(eye.forward, eye.up), eye.up, -eye.forward], 1)
                eye.pos = eye.pos + axes @ self.camera[:3, 3]
                _, eye.up, back = (axes @ self.camera[:3, :3]).T
                eye.forward = -back
        sine, cosine = np.sin(self._around), np.cos(self._around)
        turn = np.array([[cosine, -sine, 0], [sine, cosine, 0], [0, 0, 1]])
        for light in scene.lights[: scene.nlight]:
            for part in ("ambient", "diffuse", "specular"):
                setattr(light, part, getattr(light, part) * self._brightness)
            if not light.headlight:
                light.pos, light.dir = middle + turn @ (light.pos - middle), turn @ light.dir
        for thing in self._things:
            geom = scene.geoms[scene.ngeom]
            mujoco.mjv_initGeom(geom, *thing)
            geom.category = mujoco.mjtCatBit.mjCAT_DYNAMIC  # which throws shadows
            scene.ngeom += 1


def _things(
    count: int,
    random: np.random.Generator,
    area: tuple[tuple[float, float], tuple[float, float]],
    model: mujoco.MjModel,
    data: mujoco.MjData,
) -> list[Thing]:
    """Find free places on the table: where rays from above hit what most of them hit, and no site is near."""
    places, found = random.uniform(*area, (_CANDIDATES, 2)), list[Thing]()
    sizes, shapes = random.uniform(0.015, 0.035, (_CANDIDATES, 3)), random.integers(len(_SHAPES), size=_CANDIDATES)
    angles, colors = random.uniform(0, np.pi, _CANDIDATES), random.uniform(0.1, 0.9, (_CANDIDATES, 3))
    sky = data.geom_xpos[:, 2].max() + 1
    heights = np.array([_height(model, data, place, sky) for place in places])
    table = np.median(heights)
    for number, (place, size) in enumerate(zip(places, sizes, strict=True)):
        if len(found) == count:
            break
        shape, wide = _SHAPES[shapes[number]], float(np.hypot(*size[:2]))
        rim = wide * np.array([(np.cos(a), np.sin(a)) for a in np.arange(0, 2 * np.pi, np.pi / 4)])
        others = [*data.site_xpos[:, :2], *(thing.position[:2] for thing in found)]
        if any(np.linalg.norm(place - other) < wide + _AWAY for other in others):
            continue
        if any(abs(_height(model, data, place + each, sky) - table) > 0.005 for each in (*rim, 0.5 * rim[0])):
            continue
        if abs(heights[number] - table) > 0.005:
            continue
        sine, cosine = np.sin(angles[number]), np.cos(angles[number])
        if shape == mujoco.mjtGeom.mjGEOM_CYLINDER:
            size = np.array([size[0], size[2], 0])
        half = size[{"BOX": 2, "SPHERE": 0, "CYLINDER": 1}[shape.name.removeprefix("mjGEOM_")]]
        axes = np.array([cosine, -sine, 0, sine, cosine, 0, 0, 0, 1])
        position = np.array([*place, table + half])
        found.append(Thing(shape, size, position, axes, np.array([*colors[number], 1], np.float32)))
    return found


def _height(model: mujoco.MjModel, data: mujoco.MjData, place: np.ndarray, sky: float) -> float:
    hit = np.zeros(1, np.int32)
    return sky - mujoco.mj_ray(model, data, np.array([*place, sky]), np.array([0.0, 0, -1]), None, 1, -1, hit)
