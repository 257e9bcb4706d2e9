"""Coarser shapes to draw in small pictures, from a copy of a MuJoCo model: the physics keeps its own.

A software rasteriser spends most of a small picture on the faces of meshes, many in one pixel. Their vertices are
gathered on a grid, round shapes get fewer corners, and textures less resolution.
"""

import copy

import mujoco
import numpy as np

_CELL = 0.01  # m, of the grid: below one pixel of 96 in a view that is a metre wide
_DETAILED = 2000  # faces: meshes with fewer stay as they are, small things to handle among them
_SLICES, _STACKS = 12, 8  # of spheres, cylinders and capsules; MuJoCo's are 28 and 16
_QUADS = 2  # per side of a box or plane; MuJoCo's are 4
_TEXELS = 128  # of a texture's side


def coarse_model(model: mujoco.MjModel) -> mujoco.MjModel:
    """Return a copy to make a graphics context of. Geoms, materials and their numbers are those of ``model``."""
    coarse = copy.copy(model)
    coarse.vis.quality.numslices, coarse.vis.quality.numstacks = _SLICES, _STACKS
    coarse.vis.quality.numquads = _QUADS
    for mesh in range(coarse.nmesh):
        if coarse.mesh_facenum[mesh] > _DETAILED:
            _simplify(coarse, mesh)
    for texture in range(coarse.ntex):
        _shrink(coarse, texture)
    return coarse


def _simplify(model: mujoco.MjModel, mesh: int) -> None:
    """Merge the vertices within a cell of the grid, and leave out the faces that vanish or coincide by it."""
    start, count = int(model.mesh_faceadr[mesh]), int(model.mesh_facenum[mesh])
    first = int(model.mesh_vertadr[mesh])
    vertices = model.mesh_vert[first : first + int(model.mesh_vertnum[mesh])].astype(np.float64)
    of_vertex, representatives = _clusters(vertices)
    corners = of_vertex[model.mesh_face[start : start + count]]  # [faces, 3], numbers of clusters
    a, b, c = corners.T
    remaining = np.flatnonzero((a != b) & (b != c) & (a != c))
    # The same corners in the same direction are the same face, no matter which corner is first.
    turns = np.argmin(corners[remaining], axis=1)[:, None] + np.arange(3)
    _, different = np.unique(np.take_along_axis(corners[remaining], turns % 3, axis=1), axis=0, return_index=True)
    kept = remaining[np.sort(different)]
    faces = slice(start, start + len(kept))
    model.mesh_facenormal[faces] = model.mesh_facenormal[start + kept]
    model.mesh_facetexcoord[faces] = model.mesh_facetexcoord[start + kept]
    model.mesh_face[faces] = representatives[corners[kept]]
    model.mesh_facenum[mesh] = len(kept)


def _clusters(vertices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give the cluster of each vertex, and of each cluster the vertex that is nearest to its mean."""
    cells = np.floor((vertices - vertices.min(axis=0)) / _CELL).astype(np.int64)
    _, of_vertex = np.unique(cells @ [1 << 42, 1 << 21, 1], return_inverse=True)
    sizes = np.bincount(of_vertex)
    means = np.stack([np.bincount(of_vertex, axis) for axis in vertices.T], axis=1) / sizes[:, None]
    distances = np.square(vertices - means[of_vertex]).sum(axis=1)
    nearest_first = np.lexsort((distances, of_vertex))
    return of_vertex, nearest_first[np.cumsum(sizes) - sizes]


def _shrink(model: mujoco.MjModel, texture: int) -> None:
    """Average squares of texels, a power of two wide; the six sides of a cube lie below one another."""
    width, height, channels = (int(of[texture]) for of in (model.tex_width, model.tex_height, model.tex_nchannel))
    square = 1
    while width % (2 * square) == height % (2 * square) == 0 and width // (2 * square) >= _TEXELS:
        square *= 2
    start = int(model.tex_adr[texture])
    texels = model.tex_data[start : start + height * width * channels]
    rows = texels.reshape(height // square, square, -1).sum(axis=1, dtype=np.uint32)
    sums = rows.reshape(height // square, width // square, square, channels).sum(axis=2, dtype=np.uint32)
    texels = ((sums + square**2 // 2) // square**2).astype(np.uint8)
    model.tex_data[start : start + texels.size] = texels.ravel()
    model.tex_width[texture], model.tex_height[texture] = width // square, height // square
