"""Which geoms of a MuJoCo world a camera cannot see, so that no time is spent on drawing them; pixels stay the same.

Left out is what lies beside or behind the view with all of its bounding box, and is not shown by a mirror either.
"""

from collections.abc import Iterator, Sequence

import mujoco
import numpy as np

_MARGIN = 1e-3  # m around each box; float32, in which is drawn, moves nothing in these worlds by a hundredth of it
_PIXELS = 0.02  # of the picture, around a mirror
_ENDLESS = (mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_HFIELD)


class Culling:
    """Finds what is outside the view of a camera, in worlds of one model that has no shadows.

    ``drawn``, bool ``[ngeom]``, are those that are not hidden anyway; ``aspect`` is the picture's width by its height.
    """

    def __init__(self, model: mujoco.MjModel, drawn: np.ndarray, aspect: float):
        self._aspect = aspect
        self._bounded = np.flatnonzero(drawn & ~np.isin(model.geom_type, _ENDLESS) & (model.geom_rbound > 0))
        middles, halves = np.split(model.geom_aabb[self._bounded], 2, 1)
        self._middles, self._halves = middles[:, :, None], halves + _MARGIN
        self._sizes = model.geom_size.copy()
        self._box = model.geom_type == mujoco.mjtGeom.mjGEOM_BOX
        shiny = drawn & (np.append(model.mat_reflectance, 0.0)[model.geom_matid] > 0)  # -1 is no material
        self._mirrors = np.flatnonzero(shiny & (self._box | (model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE)))

    @staticmethod
    def allowed(model: mujoco.MjModel) -> bool:
        """Say whether the model has no shadows: what is beside the view may throw one into it."""
        return not (model.vis.quality.shadowsize and model.light_castshadow.any())

    def unseen(self, data: mujoco.MjData, cameras: Sequence[mujoco.MjvGLCamera]) -> np.ndarray:
        """Give the numbers of geoms that a camera surely does not show; ``cameras`` are its two of MuJoCo's scene."""
        axes = data.geom_xmat[self._bounded].reshape(-1, 3, 3)
        middles = data.geom_xpos[self._bounded] + (axes @ self._middles)[..., 0]
        unseen = np.ones(len(axes), bool)
        for eye, sides in self._views(data, cameras):
            # How far inside each side of the view the farthest corner of a box is.
            reach = (np.abs(sides @ axes) @ self._halves[:, :, None])[..., 0]
            unseen &= ((middles - eye) @ sides.T + reach < 0).any(1)
        return self._bounded[unseen]

    def _views(
        self, data: mujoco.MjData, cameras: Sequence[mujoco.MjvGLCamera]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the camera's view and those it has through mirrors: the eye, and the inward normals of five sides."""
        camera = cameras[0]
        eye = np.array([eye.pos for eye in cameras], np.float64).mean(0)  # one picture is drawn from between both eyes
        ahead, up = np.asarray(camera.forward, np.float64), np.asarray(camera.up, np.float64)
        right = np.cross(ahead, up)
        middle, half = camera.frustum_center, (camera.frustum_top - camera.frustum_bottom) / 2 * self._aspect
        sides = np.array([middle - half, middle + half, camera.frustum_bottom, camera.frustum_top])
        whole = sides / camera.frustum_near  # left, right, below and above, of what is one ahead
        yield eye, _normals(whole, ahead, right, up)
        for mirror in self._mirrors:
            # Of a box MuJoCo mirrors in the side that its z axis points to.
            facing = data.geom_xmat[mirror].reshape(3, 3)
            x, y, z = self._sizes[mirror]
            point = data.geom_xpos[mirror] + (z * facing[:, 2] if self._box[mirror] else 0.0)
            height = np.dot(eye - point, facing[:, 2])
            if height < 0:  # seen from behind
                continue
            seen = whole
            if self._box[mirror]:
                corners = point - eye + np.array([[a * x, b * y, 0] for a in (-1, 1) for b in (-1, 1)]) @ facing.T
                seen = _around(corners @ np.stack([right, up, ahead], 1), whole)
            if seen[0] < seen[1] and seen[2] < seen[3]:
                normals = _normals(seen, ahead, right, up)
                mirrored = normals - 2 * np.outer(normals @ facing[:, 2], facing[:, 2])
                yield eye - 2 * height * facing[:, 2], mirrored


def _normals(sides: np.ndarray, ahead: np.ndarray, right: np.ndarray, up: np.ndarray) -> np.ndarray:
    left, rightmost, below, above = sides
    return np.stack([right - left * ahead, rightmost * ahead - right, up - below * ahead, above * ahead - up, ahead])


def _around(corners: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Narrow the view to a mirror, whose corners are given as right, up and ahead of the eye."""
    if (corners[:, 2] < _MARGIN).any():  # reaches behind the eye
        return whole
    across, along = corners[:, 0] / corners[:, 2], corners[:, 1] / corners[:, 2]
    edge = _PIXELS * (whole[3] - whole[2])
    lows = np.maximum(whole[[0, 2]], [across.min() - edge, along.min() - edge])
    highs = np.minimum(whole[[1, 3]], [across.max() + edge, along.max() + edge])
    return np.array([lows[0], highs[0], lows[1], highs[1]])
