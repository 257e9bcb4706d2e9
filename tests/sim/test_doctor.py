"""``python -m vla_envs``: what it reports, its exit code, and that nothing it runs can hurt it."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from vla_envs import list_envs
from vla_envs.doctor import (
    _environments,
    check_asset_folder,
    check_assets_variable,
    check_extra,
    check_packages,
    check_renderers,
    check_vulkan,
)
from vla_envs.libero import package
from vla_envs.libero.package import _ARENAS, _FOLDERS
from vla_envs.probe import run_probe
from vla_envs.registry import get_benchmark
from vla_envs.rendering import vulkan

MUJOCOS = """
import sys
from vla_envs import doctor
doctor.benchmarks.names = lambda: ["libero", "metaworld"]
sys.exit(doctor.diagnose())
"""


def report(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def test_report_of_a_working_machine():
    pytest.importorskip("metaworld", reason="needs Meta-World: pip install 'vla-torchrl[metaworld]'")
    done = report("-m", "vla_envs", "--all")
    can_draw = not any(line.split()[:2] == ["broken", "Vulkan"] for line in done.stdout.splitlines())
    assert done.returncode == (0 if can_draw else 1), done.stdout
    assert "metaworld" in done.stdout.splitlines()[-1].removeprefix("Usable now: ").split(", ")
    installed = {each.name for each in entry_points(group="vla_torchrl.benchmarks")}  # other tests register more
    assert {name for name in list_envs() if name.partition("/")[0] in installed} <= set(done.stdout.split())


def test_tasks_alone_are_one_line():
    calvin = get_benchmark("calvin")
    lines = _environments(calvin, [f"calvin/{suite}" for suite in calvin.suites()], all_names=False)
    assert len(lines) == 8
    assert lines[-1].startswith("  calvin/<task>  for each of 34 tasks: rotate_red_block_right, ")


def test_no_renderer_means_not_usable_and_says_what_to_type():
    pytest.importorskip("mujoco", reason="needs MuJoCo: pip install 'vla-torchrl[metaworld]'")
    done = report("-c", MUJOCOS, MUJOCO_GL="osmesa", PYOPENGL_PLATFORM="egl")  # MuJoCo refuses this pair
    lines = done.stdout.splitlines()
    broken = next(index for index, line in enumerate(lines) if "MUJOCO_GL=osmesa" in line)
    assert lines[broken].split()[0] == "broken"
    assert "in use" in lines[broken]
    assert "->" in lines[broken + 1]
    assert "libosmesa6" in lines[broken + 1]
    assert done.returncode == 1
    assert not {"metaworld,", "metaworld", "libero,"} & set(lines[-1].split())


def test_a_vulkan_driver_that_does_not_work_says_what_to_type(monkeypatch):
    pytest.importorskip("sapien", reason="ManiSkill is not installed: pip install 'vla-torchrl[maniskill]'")
    monkeypatch.setattr(vulkan, "try_driver", lambda: (False, "RuntimeError: vk: ErrorIncompatibleDriver"))
    found = check_vulkan("maniskill")
    assert found.status == "broken"
    assert "no Vulkan driver" in found.detail
    installer = Path(found.remedy.removeprefix("python ").split()[0])
    assert installer.name == "install_vulkan_driver.py"
    assert installer.is_file()


def test_a_working_renderer_is_really_drawn_with(monkeypatch):
    pytest.importorskip("mujoco", reason="needs MuJoCo: pip install 'vla-torchrl[metaworld]'")
    monkeypatch.setenv("MUJOCO_GL", "no-such-renderer")
    first, *others = check_renderers("metaworld")
    assert first.status == "broken"
    assert "no-such-renderer" in first.detail
    if not any(finding.status == "ok" for finding in others):
        pytest.skip("neither EGL nor OSMesa works on this machine")
    assert "export MUJOCO_GL=" in first.remedy


def test_simulator_that_is_not_installed():
    imported = check_extra("no_such_simulator")[-1]
    assert imported.status == "missing"
    assert imported.remedy == "pip install 'vla-torchrl[no_such_simulator]'"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("input('Download? [y/N] ')", "EOFError"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
        ("raise ValueError('first')", "ValueError: first"),
        ("import sys; sys.exit(3)", "exit status 3"),
    ],
)
def test_probes_contain_what_they_run(code, reason):
    ok, detail = run_probe(code, timeout=1.0 if "sleep" in code else 60.0)
    assert not ok
    assert reason in detail


def test_versions_are_compared():
    found = check_packages(
        [
            "numpy>=1",
            "packaging<0.1",
            "no-such-package==1.0",
            'other; extra == "metaworld"',
            'old; python_version < "3.0"',
        ]
    )
    assert [finding.status for finding in found] == ["ok", "broken", "missing"]
    assert found[1].remedy == "pip install 'packaging<0.1'"
    only_extra = check_packages(["numpy>=1", 'no-such-simulator==2; extra == "metaworld"'], extra="metaworld")
    assert [finding.name for finding in only_extra] == ["no-such-simulator"]


def test_assets_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VLA_TORCHRL_ASSETS", str(tmp_path / "nowhere"))
    assert check_assets_variable().status == "missing"
    assert "export" in check_assets_variable().remedy
    (tmp_path / "libero").mkdir()
    monkeypatch.setenv("VLA_TORCHRL_ASSETS", str(tmp_path))
    assert check_assets_variable().status == "ok"
    assert "libero" in check_assets_variable().detail


def test_libero_assets(monkeypatch, tmp_path):
    monkeypatch.setenv("VLA_TORCHRL_ASSETS", str(tmp_path))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("vla_envs.libero.package.find_spec", lambda name: None)
    found = check_asset_folder("LIBERO", package.find_assets, package.describe_assets)
    assert found.status == "missing"
    assert found.remedy.startswith("python -m vla_envs fetch libero-assets ")
    for name in (*_ARENAS, *_FOLDERS):
        (tmp_path / "libero" / "assets" / name).mkdir(parents=True)
    assert check_asset_folder("LIBERO", package.find_assets, package.describe_assets).status == "ok"
    (tmp_path / "libero" / "assets" / "MANIFEST.md").write_text("stand-ins")
    assert "stand-ins" in check_asset_folder("LIBERO", package.find_assets, package.describe_assets).detail
