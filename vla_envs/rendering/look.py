"""What of a MuJoCo world is drawn otherwise than it is simulated: camera, light, and things that nothing touches."""

from typing import Any

import mujoco
import numpy as np

from vla_envs.stress import camera_motion, light_change, rotation

_THINGS, _ATTEMPTS = 8, 200  # at strength 1, and to find places for them
_SIZES = 0.015, 0.035  # m; half of a thing
_AWAY = 0.06  # m that a thing keeps from the middle of a site, such as a goal, beside its own size
_SHAPES = [mujoco.mjtGeom.mjGEOM_BOX, mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_CYLINDER]


class Look:
    """How an episode looks; ``area``: the lowest and highest x and y, m, of the part of the table that is in view."""

    def __init__(self, area: tuple[tuple[float, float], tuple[float, float]], model: Any, data: Any):
        self._area, self._model, self._data = np.array(area), model, data
        self._sky = data.geom_xpos[:, 2].max() + 1
        grid = np.linspace(self._area[0], self._area[1], 12)
        self._table = np.median([self._height((x, y)) for x in grid[:, 0] for y in grid[:, 1]])
        self._middle = np.append(self._area.mean(0), self._table)
        self.camera: np.ndarray | None = None
        self._brightness, self._turn = np.ones(3), np.eye(3)
        self._things: list[tuple[Any, ...]] = []  # shape, size, position, axes and color of each

    def draw(self, kind: str, strength: float, random: np.random.Generator) -> None:
        """Draw one kind of stress for the world as it is."""
        if kind == "camera":
            self.camera = strength * random.uniform(-1, 1, 6)
        elif kind == "light":
            self._brightness, self._turn = light_change(strength, random)
        else:
            self._place(int(np.ceil(_THINGS * strength)), random)

    def apply(self, scene: mujoco.MjvScene, first_camera: bool) -> None:
        """Change what is about to be drawn."""
        draw = self.camera if first_camera and self.camera is not None else np.zeros(6)
        for eye in scene.camera if draw.any() else ():
            axes = np.stack([np.cross(eye.forward, eye.up), eye.up, -eye.forward], 1).astype(np.float64)
            view = 2 * np.arctan(eye.frustum_top / eye.frustum_near)
            motion = camera_motion(draw, (self._middle - eye.pos) @ eye.forward, view)
            eye.pos = eye.pos + axes @ motion[:3, 3]
            _, eye.up, back = (axes @ motion[:3, :3]).T
            eye.forward = -back
        for light in scene.lights[: scene.nlight]:
            for part in ("ambient", "diffuse", "specular"):
                setattr(light, part, getattr(light, part) * self._brightness)
            if not light.headlight:
                light.pos = self._middle + self._turn @ (light.pos - self._middle)
                light.dir = self._turn @ light.dir
        for thing in self._things:
            geom = scene.geoms[scene.ngeom]
            mujoco.mjv_initGeom(geom, *thing)
            geom.category = mujoco.mjtCatBit.mjCAT_DYNAMIC  # which throws shadows
            scene.ngeom += 1

    def _place(self, count: int, random: np.random.Generator) -> None:
        """Find free places on the table, without any site, such as a goal."""
        sites, self._things = self._data.site_xpos[:, :2], []
        for _ in range(_ATTEMPTS):
            place, size, shape = random.uniform(*self._area), random.uniform(*_SIZES, 3), random.choice(_SHAPES)
            angle, color = random.uniform(0, np.pi), np.append(random.uniform(0.1, 0.9, 3), 1).astype(np.float32)
            wide = max(size)
            others = np.array([*sites, *(thing[2][:2] for thing in self._things)]).reshape(-1, 2)
            rim = [(r * np.cos(a), r * np.sin(a)) for r in (0, wide, 1.5 * wide) for a in np.arange(0, 6, np.pi / 4)]
            if len(self._things) == count:
                return
            near = (np.linalg.norm(others - place, axis=1) < wide + _AWAY).any()
            if near or any(abs(self._height(place + each) - self._table) > 0.005 for each in rim):
                continue
            if shape == mujoco.mjtGeom.mjGEOM_CYLINDER:
                size = np.array([size[0], size[2], 0])  # radius and half of its height
            half = size[{mujoco.mjtGeom.mjGEOM_BOX: 2, mujoco.mjtGeom.mjGEOM_CYLINDER: 1}.get(shape, 0)]
            position = np.array([*place, self._table + half])
            self._things.append((shape, size, position, rotation(0, 0, angle).ravel(), color))

    def _height(self, place: Any) -> float:
        """Return how high what a ray from above hits is, m."""
        start, hit = np.array([*place, self._sky]), np.zeros(1, np.int32)
        return self._sky - mujoco.mj_ray(self._model, self._data, start, np.array([0.0, 0, -1]), None, 1, -1, hit)
