"""What a camera cannot see is not drawn, and no pixel changes."""

import numpy as np
import pytest

pytest.importorskip("mujoco")
from vla_envs.rendering.mujoco import Renderer, mujoco

WORLD = """
<mujoco>
  <visual><quality shadowsize="{shadows}"/></visual>
  <asset>
    <material name="mirror" reflectance="0.6" rgba="0.3 0.3 0.4 1"/>
    <mesh name="wedge" vertex="0 0 0  0.3 0 0  0 0.5 0  0 0 0.9  0.1 0.2 0.4"/>
  </asset>
  <worldbody>
    <light pos="0 0 4" castshadow="{casts}"/>
    <geom type="plane" size="{floor}" {shiny} rgba="0.6 0.5 0.4 1"/>
    <geom type="box" size="0.7 0.5 0.1" pos="0.3 0 0.4" euler="8 -5 20" material="mirror"/>
    {geoms}
    <camera name="eye" fovy="50"/>
  </worldbody>
</mujoco>
"""
KINDS = ('type="sphere" size="0.1"', 'type="capsule" size="0.05 0.2"', 'type="box" size="0.1 0.2 0.05"',
         'type="cylinder" size="0.08 0.1"', 'type="mesh" mesh="wedge"')  # fmt: skip


def world(random, *, floor="3 3 1", shiny="", shadows=0, casts="false"):
    geoms = []
    for number in range(60):
        place, turn = " ".join(map(str, random.uniform((-2, -2, -0.2), (2, 2, 3.8)))), random.uniform(-180, 180, 3)
        color = " ".join(map(str, [*random.uniform(0, 1, 3), random.choice([1, 1, 1, 0.5])]))
        turned = " ".join(map(str, turn))
        geoms.append(f'<geom {KINDS[number % len(KINDS)]} pos="{place}" euler="{turned}" rgba="{color}"/>')
    return mujoco.MjModel.from_xml_string(
        WORLD.format(geoms="\n".join(geoms), floor=floor, shiny=shiny, shadows=shadows, casts=casts)
    )


@pytest.mark.parametrize(
    "options", [{}, {"shiny": 'material="mirror"'}, {"floor": "0 0 1", "shiny": 'material="mirror"'}]
)
def test_pixels_are_those_of_a_whole_scene(options):
    """From 40 places, of a world with a tilted mirror, and with another on the floor or as far as one sees."""
    random = np.random.default_rng(3)
    model = world(random, **options)
    data = mujoco.MjData(model)
    renderer, drawn = Renderer(model, size=(96, 128), quality="benchmark", cameras=["eye"], skip_unseen=True), []
    culling = renderer._culling
    for _ in range(40):
        model.cam_pos[0] = random.uniform((-3, -3, -0.5), (3, 3, 5.5))
        model.cam_quat[0] = random.standard_normal(4)
        model.cam_quat[0] /= np.linalg.norm(model.cam_quat[0])
        mujoco.mj_forward(model, data)
        frame = renderer.render(model, data).copy()
        drawn.append(renderer._scene.ngeom)
        renderer._culling = None
        whole = renderer.render(model, data)
        everything, renderer._culling = renderer._scene.ngeom, culling
        assert np.array_equal(frame, whole)
        assert (model.geom_group == 0).all(), "geoms were left hidden"
    assert np.median(drawn) < 0.8 * everything, drawn


def test_a_world_with_shadows_is_drawn_as_a_whole():
    model = world(np.random.default_rng(0), shadows=1024, casts="true")
    assert Renderer(model, size=(32, 32), quality="benchmark", cameras=["eye"], skip_unseen=True)._culling is None
    model = world(np.random.default_rng(0), shadows=1024, casts="false")
    assert Renderer(model, size=(32, 32), quality="benchmark", cameras=["eye"], skip_unseen=True)._culling is not None
