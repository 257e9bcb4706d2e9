"""Every benchmark passes ``check_simulator``: the same bits anywhere, and the checkers of TorchRL and Gymnasium."""

import pytest
from simulators import SLOW, libero_assets, need_robotwin, needs_maniskill_driver

from vla_envs import check_simulator, make_spec
from vla_envs.calvin import package

pytestmark = pytest.mark.timeout(400)  # each starts seven simulators
slow = pytest.mark.skipif(not SLOW, reason="SAPIEN begins seven times, a minute and more: VLA_TORCHRL_SLOW=1")
FAST = {"image_size": 32, "render_quality": "fast"}


def passes(name, **options):
    assert check_simulator(make_spec(name, **options)) == ()


def test_metaworld():
    pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
    passes("metaworld/MT50", max_episode_steps=12, **FAST)


def test_libero():
    libero_assets()
    passes("libero/spatial", max_episode_steps=12, **FAST)


@slow
@needs_maniskill_driver
def test_maniskill():
    pytest.importorskip("mani_skill", reason="ManiSkill is not installed: pip install 'vla-torchrl[maniskill]'")
    passes("maniskill/PushCube-v1", image_size=32, max_episode_steps=12)


@pytest.mark.skipif(
    bool(package.CHECKOUT.missing(package.CHECKOUT.places()[0])),
    reason=f"no checkout of calvin_env: python -m vla_envs fetch {package.CHECKOUT.fetch}",
)
def test_calvin():
    passes("calvin/D", image_size=32, wrist_camera=False, max_episode_steps=12)


@slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SAPIEN, at RoboTwin
def test_robotwin():
    need_robotwin()
    passes("robotwin/click_bell", render_quality="fast", collect_wrist_camera=False, step_lim=6, seeds="range")
