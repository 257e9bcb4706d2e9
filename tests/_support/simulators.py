"""What the tests of a simulator need of this machine; where it lacks that, they are skipped with the reason."""

import os

import pytest

import vla_envs.libero.package as package
from vla_envs.maniskill import assets
from vla_envs.rendering import vulkan
from vla_envs.robotwin import package as robotwin

SLOW = bool(os.environ.get("VLA_TORCHRL_SLOW"))


def some(cases, each):
    """Every so many-th of some cases, such as the tasks of a benchmark; all of them with ``VLA_TORCHRL_SLOW=1``."""
    return list(cases)[:: 1 if SLOW else each]


def libero_assets():
    """The folder of LIBERO's assets; skips the calling module without LIBERO or them."""
    pytest.importorskip("libero", reason="LIBERO is not installed: python -m vla_envs fetch libero")
    try:
        return package.find_assets()
    except FileNotFoundError as error:
        return pytest.skip(f"no LIBERO assets: {str(error).splitlines()[-1].strip()}", allow_module_level=True)


def _unless(*checks):
    """Skip a test with what is missing."""
    try:
        for check in checks:
            check()
    except (vulkan.VulkanError, FileNotFoundError) as error:
        return pytest.mark.skip(reason=str(error))
    return lambda test: test


def needs_maniskill_driver(test):
    """Skip a test without a Vulkan driver."""
    return _unless(vulkan.check_driver)(test)


def needs_plate25(test):
    """Skip a test without a Vulkan driver or plate-25's assets."""
    return _unless(vulkan.check_driver, assets.find_assets)(test)


def need_robotwin():
    """Skip the calling test or module without a Vulkan driver, a checkout of RoboTwin or assets."""
    try:
        vulkan.check_driver()
        robotwin.check_packages()
    except (vulkan.VulkanError, ImportError, FileNotFoundError) as error:
        pytest.skip(str(error).splitlines()[-1].strip(), allow_module_level=True)
