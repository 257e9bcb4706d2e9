"""Which device MuJoCo draws with: one GPU per worker in turn, OSMesa where EGL finds nothing."""

import ctypes.util
import os
import subprocess
import sys

import pytest

from vla_envs import make_env, make_spec
from vla_envs.maniskill.simulator import ManiSkillSimulator, _render_backend
from vla_envs.rendering import egl, vulkan
from vla_envs.rendering.egl import device_of_worker, egl_devices
from vla_envs.rendering.gpus import GPUS, WORKER, check_gpus, chosen_gpus, worker_environment

# EGL's number -> CUDA's: two GPUs in another order than CUDA's, and Mesa on the CPU.
DEVICES = {0: 1, 1: 0, 2: None}


@pytest.mark.parametrize(
    ("devices", "visible", "chosen"),
    [
        (DEVICES, None, [1, 0, 1]),
        (DEVICES, "0,1", [1, 0, 1]),
        (DEVICES, "1,0", [0, 1, 0]),
        (DEVICES, "1", [0, 0, 0]),
        (DEVICES, "GPU-8f0c,GPU-77aa", [1, 0, 1]),
        (DEVICES, "", [1, 0, 1]),
        (DEVICES, "7", [None, None, None]),
        ({0: None}, "0", [None, None, None]),
    ],
)
def test_workers_take_turns_on_the_gpus_that_cuda_shows(devices, visible, chosen):
    assert [device_of_worker(devices, visible, worker) for worker in range(3)] == chosen


@pytest.mark.parametrize(
    ("visible", "gpus", "chosen"),
    [
        (None, (1, 0), [0, 1, 0]),
        (None, (0,), [1, 1, 1]),
        ("1,0", (0,), [0, 0, 0]),  # which is CUDA's 1
        ("1,0", (1, 0), [1, 0, 1]),
        ("1", (0,), [0, 0, 0]),
    ],
)
def test_workers_take_turns_on_chosen_gpus(visible, gpus, chosen):
    assert [device_of_worker(DEVICES, visible, worker, gpus) for worker in range(3)] == chosen


def test_chosen_gpus_that_egl_cannot_find_are_refused():
    with pytest.raises(ValueError, match=r"gpus=\[0,2\]: EGL, which draws, does not have GPU 2; run"):
        device_of_worker(DEVICES, None, 1, (0, 2))
    with pytest.raises(ValueError, match=r"does not have GPU 1"):
        device_of_worker(DEVICES, "0,5", 0, (1,))
    with pytest.raises(ValueError, match="names of CUDA_VISIBLE_DEVICES=GPU-8f0c; type their numbers there"):
        device_of_worker(DEVICES, "GPU-8f0c", 0, (0,))


def test_a_worker_is_told_its_number_and_the_chosen_gpus(monkeypatch):
    for name, value in worker_environment(3, (4, 5)).items():
        monkeypatch.setenv(name, value)
    assert (os.environ[WORKER], chosen_gpus()) == ("3", (4, 5))
    monkeypatch.setattr(egl, "chosen_gpus", lambda: (1,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        os, "environ", os.environ | {"MUJOCO_EGL_DEVICE_ID": "1", "VLA_TORCHRL_MUJOCO_EGL_DEVICE_ID": ""}
    )
    egl.take_device("MUJOCO_EGL_DEVICE_ID", DEVICES)
    assert os.environ["MUJOCO_EGL_DEVICE_ID"] == "0", "not that of the process that started it"
    os.environ |= {"EGL_VISIBLE_DEVICES": "1"}
    egl.take_device("EGL_VISIBLE_DEVICES", DEVICES)
    assert os.environ["EGL_VISIBLE_DEVICES"] == "1", "what the user says stays"
    for name, value in worker_environment(0, None).items():  # of a pool inside a worker, too
        monkeypatch.setenv(name, value)
    assert chosen_gpus() == ()


@pytest.mark.parametrize(
    ("gpus", "shown", "visible", "message"),
    [
        (
            (4, 5),
            0,
            None,
            r"gpus=\[4,5\]: CUDA shows no GPU to this process; leave out env.gpus \(null\) and placement.env",
        ),
        ((0,), 0, "", r"no GPU to this process \(CUDA_VISIBLE_DEVICES=\); leave out env.gpus"),
        ((4, 5), 2, "4,5", r"GPUs 0 to 1 .*=4,5\); type env.gpus=\[0,1\] or placement.env=0-1, or fewer"),
        ((1,), 1, None, r"GPU 0 alone to this process; type env.gpus=\[0\] or placement.env=0, or fewer"),
        ((-1,), 2, None, "GPUs 0 to 1"),
        ((1, 0, 1), 2, None, r"name each GPU once; type env.gpus=\[1,0\]"),
        ((), 2, None, r"name each GPU once; type env.gpus=\[0\]"),
    ],
)
def test_gpus_that_there_are_not_are_one_line_before_work(monkeypatch, gpus, shown, visible, message):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match=message) as found:
        check_gpus(gpus, shown)
    assert "\n" not in str(found.value)
    check_gpus(range(max(shown, 1)), max(shown, 1))


def test_what_contradicts_the_chosen_gpus_is_refused(monkeypatch):
    for name in ("MUJOCO_EGL_DEVICE_ID", "EGL_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    button, calvin = make_spec("metaworld/button-press"), make_spec("calvin/D", renderer="tiny")
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    with pytest.raises(
        ValueError, match=r"gpus=\[0\]: MUJOCO_GL=osmesa draws with no GPU; type MUJOCO_GL=egl, or leave"
    ):
        button.check_gpus([0])
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setattr(egl, "run_probe", lambda code: (True, '{"0": 1, "1": 0}'))
    button.check_gpus([0, 1])
    with pytest.raises(ValueError, match="does not have GPU 2"):
        button.check_gpus([0, 2])
    monkeypatch.setattr(egl, "run_probe", lambda code: (False, "no libEGL"))
    with pytest.raises(ValueError, match="does not have GPU 0"):
        button.check_gpus([0])
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "3")
    with pytest.raises(ValueError, match="MUJOCO_EGL_DEVICE_ID=3 says which device draws, too; type unset MUJOCO_EGL"):
        button.check_gpus([0])
    with pytest.raises(ValueError, match="renderer=tiny draws on the CPU; type env"):
        calvin.check_gpus([0])
    batched = make_spec("maniskill/PutOnPlateInScene25Main-v3", backend="cuda")
    with pytest.raises(ValueError, match=r"all worlds on one GPU; type env.gpus=\[4\], or"):
        batched.check_gpus([4, 5])
    monkeypatch.setattr(vulkan, "has_gpu", lambda: False)
    for spec in (batched, make_spec("robotwin/click_bell", seeds="range")):
        with pytest.raises(ValueError, match=r"gpus=\[4\]: SAPIEN draws on the CPU here"):
            spec.check_gpus([4])
    monkeypatch.setattr(vulkan, "has_gpu", lambda: True)
    batched.check_gpus([4])


def test_a_simulator_that_cannot_be_told_refuses_chosen_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delattr(ManiSkillSimulator, "check_gpus")
    with pytest.raises(ValueError, match=r"gpus=\[0,1\]: maniskill/PushCube-v1 cannot be told which GPU to draw with"):
        make_env("maniskill/PushCube-v1", num_envs=2, gpus=[0, 1])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError, match="CUDA shows no GPU"):
        make_env("maniskill/PushCube-v1", num_envs=2, gpus=[0, 1])


@pytest.mark.parametrize(
    ("gpus", "shown", "visible", "chosen"),
    [
        ("", 4, None, ["0", "3", "1"]),
        ("2,1", 4, None, ["2", "1", "1"]),
        ("1", 2, "4,5", ["5", "5", "5"]),
        ("1,0", 2, "GPU-8f0c,GPU-77aa", ["GPU-77aa", "GPU-8f0c", "GPU-8f0c"]),
    ],
)
def test_sapiens_workers_take_turns(monkeypatch, gpus, shown, visible, chosen):
    """RoboTwin's are shown one GPU alone; ManiSkill gets the number of one that is shown."""
    monkeypatch.setattr(vulkan, "has_gpu", lambda: True)
    monkeypatch.setattr("vla_envs.maniskill.simulator.has_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: shown)
    monkeypatch.setenv(GPUS, gpus)
    names = visible.split(",") if visible else [str(number) for number in range(shown)]
    found, told = [], []
    for worker in ("0", "3", "5"):
        monkeypatch.setattr(vulkan, "_own", [])
        monkeypatch.setenv(WORKER, worker)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        told.append(names[int(_render_backend().removeprefix("cuda:"))])
        vulkan.show_own_gpu(shown)
        vulkan.show_own_gpu(1)  # for a second world of this worker
        found.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert found == told == chosen
    monkeypatch.delenv(WORKER)
    monkeypatch.setattr(vulkan, "_own", [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    vulkan.show_own_gpu(2)  # a process of the user's own is left alone
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"


def drawn(environment):
    """Draws a Meta-World frame in a process with this environment; returns backend, brightness and warnings."""
    pytest.importorskip("metaworld", reason="Meta-World is not installed: make setup")
    code = """
import os
from vla_envs import make_spec
from vla_envs.simulator import Episode
simulator = make_spec("metaworld/reach", image_size=32, render_quality="fast").make()
simulator.reset(Episode(0, 0))
print(os.environ["MUJOCO_GL"], simulator.observe().images.mean())
"""
    unset = {key: value for key, value in os.environ.items() if key not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**unset, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    assert ran.returncode == 0, ran.stderr
    backend, brightness = ran.stdout.split()
    return backend, float(brightness), ran.stderr


@pytest.mark.skipif(not egl_devices(), reason="EGL finds no device: sudo apt-get install libegl1 libegl-mesa0")
def test_egl_where_it_works():
    backend, _, said = drawn({})
    assert backend == "egl"
    assert "Warning" not in said


@pytest.mark.skipif(not ctypes.util.find_library("OSMesa"), reason="no OSMesa: sudo apt-get install libosmesa6")
def test_osmesa_with_a_warning_where_egl_finds_nothing():
    hidden = {"__EGL_VENDOR_LIBRARY_FILENAMES": "/nowhere"}
    backend, brightness, said = drawn(hidden)
    assert backend == "osmesa"
    assert "EGL finds no device" in said
    assert "MUJOCO_GL=osmesa" in said
    asked, same, said = drawn({**hidden, "MUJOCO_GL": "osmesa"})
    assert (asked, same) == ("osmesa", brightness)
    assert "Warning" not in said


def test_the_doctor_says_what_workers_take_turns_on(monkeypatch):
    from vla_envs import doctor

    monkeypatch.setattr(doctor, "egl_devices", lambda: DEVICES)
    monkeypatch.setattr(doctor, "run_probe", lambda code, environment: (True, "NVIDIA"))
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    for shown, expected in [
        (2, "NVIDIA, in use; workers take turns on GPUs 0 to 1 (env.gpus chooses)"),
        (1, "NVIDIA, in use"),
    ]:
        monkeypatch.setattr("torch.cuda.device_count", lambda shown=shown: shown)
        doctor._try_renderers.cache_clear()
        assert doctor._try_renderers("egl")[0].detail == expected
    doctor._try_renderers.cache_clear()
