"""What CALVIN needs of a machine: the doctor's report, what is missing in one line, and that nothing is printed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vla_envs import Episode, folders, make_env, make_spec
from vla_envs.calvin import check, package, world
from vla_envs.rendering.egl import egl_devices

pytest.importorskip("pybullet", reason="needs CALVIN's packages: pip install 'vla-torchrl[calvin]'")
CHECKOUT = next((place for place in package.CHECKOUT.places() if not package.CHECKOUT.missing(place)), None)
pytestmark = pytest.mark.skipif(
    CHECKOUT is None, reason="no checkout of calvin_env: type python -m vla_envs fetch calvin"
)
# What Python runs at its start: the packages named cannot be found, as if they were not installed.
HIDE = """
from importlib.machinery import PathFinder
found = PathFinder.find_spec.__func__
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] in {hidden!r} else found(cls, name, *rest)
)
"""
USE = """
import sys
from vla_envs import Episode, make_spec
for name in ("pybullet", "calvin_env", "git", "quaternion"):
    assert name not in sys.modules, name
simulator = make_spec("calvin/D", image_size=32, renderer={renderer!r}).make()
simulator.reset(Episode(0, 0))
simulator.observe()
simulator.close()
for name in ("cv2", "gym", "pandas", "hydra", "tacto", "matplotlib", "torch"):
    assert name not in sys.modules, name
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Lacks packages or the checkout, as the test says; this process and those it starts."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("VLA_TORCHRL_ASSETS", "CALVIN_ENV_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "first"), *filter(None, sys.path)]))
    (tmp_path / "first").mkdir()
    return tmp_path


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


def finding(name, findings=None):
    return next(found for found in findings or check() if name in found.name)


def message():
    """The last line that a program ends with which makes a CALVIN environment."""
    done = run("from vla_envs import make_env; make_env('calvin/D', num_envs=1)")
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


def test_a_complete_machine():
    findings = check()
    assert all(found.status == "ok" for found in findings if found.required), findings
    assets = finding("assets", findings)
    assert assets.detail == str(CHECKOUT.resolve()), "the pinned commit"
    assert "3.2.7" in finding("pybullet", findings).detail
    assert "draws" in finding("PyBullet renderer", findings).detail


def test_without_pybullet(machine):
    (machine / "first" / "sitecustomize.py").write_text(HIDE.format(hidden=("pybullet", "git")))
    findings = check()
    missing = finding("import pybullet", findings)
    assert missing.status == "broken"
    assert "CALVIN needs pybullet, gitpython, not installed; type: make setup" in missing.detail
    assert not [found for found in findings if "renderer" in found.name]
    assert "CALVIN needs pybullet, gitpython, not installed; type: make setup" in message()


def test_another_version_of_pybullet(machine):
    information = machine / "first" / "pybullet-3.2.6.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: pybullet\nVersion: 3.2.6\n")
    wrong = finding("import pybullet")
    assert (wrong.status, wrong.required) == ("broken", True)
    assert "there is 3.2.6; type: pip install pybullet==3.2.7" in wrong.detail
    assert "there is 3.2.6; type: pip install pybullet==3.2.7" in message()


def test_without_a_checkout(machine):
    findings = check()
    missing = finding("assets", findings)
    assert (missing.status, missing.required) == ("missing", True)
    assert missing.remedy.startswith("python -m vla_envs fetch calvin ")
    assert f"{machine}/home/.cache/calvin_env: no such folder" in missing.detail
    assert finding("import pybullet", findings).status == "ok"


def test_a_checkout_that_is_named_is_the_only_one(machine, monkeypatch):
    shutil.copytree(CHECKOUT, machine / "home" / ".cache" / "calvin_env", ignore=shutil.ignore_patterns("*.obj"))
    assert finding("assets").status == "ok"
    copy = shutil.copytree(CHECKOUT, machine / "copy", ignore=shutil.ignore_patterns("static.yaml", "*.obj"))
    monkeypatch.setenv("CALVIN_ENV_PATH", str(copy))
    incomplete = finding("assets")
    assert incomplete.status == "missing"
    assert incomplete.detail == f"{copy}: incomplete, lacks conf/cameras/cameras/static.yaml"
    with pytest.raises(FileNotFoundError, match=r"lacks conf/cameras/cameras/static\.yaml"):
        make_env("calvin/D", num_envs=1)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        make_env("calvin/D", num_envs=1, path=str(machine / "nowhere"))


def test_an_edited_checkout_is_said_beside_results(machine):
    copy = shutil.copytree(CHECKOUT, machine / "copy", ignore=shutil.ignore_patterns("*.obj"))
    assert not any("is not calvin_env" in text for text in make_spec("calvin/D", path=str(copy)).protocol_deviations)
    with open(copy / "conf" / "scene" / "calvin_scene_D.yaml", "a") as file:
        file.write("# mine\n")
    folders._digest_of.cache_clear()
    deviations = make_spec("calvin/D", path=str(copy)).protocol_deviations
    assert f"{copy} is not calvin_env at {package.CHECKOUT.commit[:12]}" in deviations


@pytest.mark.parametrize("renderer", ["tiny", "egl"])
def test_nothing_is_printed_and_nothing_else_is_imported(renderer):
    if renderer == "egl" and not egl_devices():
        pytest.skip("no EGL on this machine")
    done = run(USE.format(renderer=renderer))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_output_that_is_closed_does_no_harm():
    program = f"{sys.executable} -c '{USE.format(renderer='tiny').replace(chr(39), chr(34))}'"
    for closed in (">&-", "2>&-", ">&- 2>&- <&-"):
        assert subprocess.run(["bash", "-c", f"{program} {closed}"], timeout=120, check=False).returncode == 0


def test_workers_print_nothing(capfd):
    env = make_env("calvin/D", num_envs=2, num_workers=2, image_size=32, wrist_camera=False, seed=0)
    env.reset()
    env.close()
    assert capfd.readouterr() == ("", "")


def test_an_egl_that_cannot_be_used_is_one_line_before_any_worker(monkeypatch):
    monkeypatch.setenv("EGL_VISIBLE_DEVICES", "99")  # PyBullet ends the process that names a device that is not there
    with pytest.raises(RuntimeError, match=r"EGL renderer cannot be used on this machine \(.*\); type renderer=tiny$"):
        make_env("calvin/D", num_envs=1, renderer="egl")


@pytest.mark.skipif(not egl_devices(), reason="no EGL on this machine")
def test_egl_draws_the_same_whether_it_is_the_first_episode_or_not():
    def frames(*trials):
        simulator = make_spec("calvin/D", renderer="egl").make()
        for trial in trials:
            simulator.reset(Episode(0, trial))
            seen = simulator.observe()
        simulator.close()
        return seen.images, seen.wrist_images

    for first, later in zip(frames(0), frames(1, 0), strict=True):
        np.testing.assert_array_equal(first, later)


def test_both_renderers_see_a_ball():
    assert world.try_renderer(egl=False) == (True, "")


def test_a_folder_named_calvin_env_in_the_current_folder_does_no_harm(tmp_path):
    for folder in ("calvin_env", "git", "conf"):
        (tmp_path / folder).mkdir()
    (tmp_path / "calvin_env" / "__init__.py").write_text("raise RuntimeError('the wrong one')\n")
    code = USE.format(renderer="tiny")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert Path(tmp_path / "calvin_env").is_dir()
