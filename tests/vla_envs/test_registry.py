"""Benchmarks from outside: by a call, by an entry point, broken ones; finished SimulatorSpecs; settings."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from gymnasium.utils.env_checker import check_env
from paths import CONF
from scripted import scripted_spec

from vla_common import keys
from vla_common.registry import Registry, benchmarks
from vla_common.schema import get_schema
from vla_common.settings import Count, check_settings
from vla_envs import (
    Benchmark,
    BenchmarkSchema,
    Episode,
    EpisodeQueue,
    Gripper,
    SimulatorSpec,
    WorkerPool,
    doctor,
    env_types,
    evaluation_episodes,
    list_envs,
    make_env,
    make_spec,
    register_benchmark,
)
from vla_envs.probe import ASSETS, RENDERING, Finding, run_probe

SCHEMA = BenchmarkSchema(
    image_size=(2, 2),
    states=("steps",),
    actions=("x", "gripper"),
    instruction="play it back",
    gripper=Gripper(dimension=1, closed=-1.0, opened=1.0),
)
REWARDS = [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


def make_toy_spec(suite: str, *, horizon: Count = 4) -> SimulatorSpec:
    """Trial 0 is solved by the third action, trial 1 never."""
    spec = scripted_spec([rewards[:horizon] for rewards in REWARDS], [3, 0], action_dim=2)
    return replace(spec, id=f"toy/{suite}", initial_states=2)


def make_toy(name="toy", title="Toy", suites=("easy-v2", "hard"), **others):
    return Benchmark(name, title, SCHEMA, make_toy_spec, lambda: suites, **others)


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(benchmarks, "_registered", dict(benchmarks._registered))
    before = set(gymnasium.registry)
    yield
    for id in set(gymnasium.registry) - before:
        del gymnasium.registry[id]


# ---- a benchmark that is registered


def test_a_registered_benchmark_is_one_of_the_benchmarks():
    register_benchmark(make_toy())
    assert {"toy/easy-v2", "toy/hard", "metaworld/MT50"} <= set(list_envs())
    assert make_spec("toy/hard").benchmark == "toy"
    assert make_spec("toy/hard", horizon=2).max_episode_steps == 2
    assert get_schema("toy") is SCHEMA
    assert SCHEMA.state_dim == 1
    assert SCHEMA.action_dim == 2
    register_benchmark(benchmarks.get("toy"))  # the same again does no harm

    env = make_env("toy/hard", 2, 2, episodes=EpisodeQueue(evaluation_episodes(make_spec("toy/hard"))), horizon=3)
    after = env.rollout(2, lambda td: td.set(keys.ACTION, torch.zeros(2, 2, 2)), break_when_any_done=False)[keys.NEXT]
    env.close()
    assert after[keys.STEP_REWARDS].tolist() == [[[0, 0], [1, 0]], [[0, 0], [0, 0]]]
    assert after[keys.TERMINATED][:, -1, 0].tolist() == [True, False]
    assert after[keys.TRUNCATED][1, -1]

    env = gymnasium.make("vla/Toy-easy-v0", horizon=3)  # the version is ours
    check_env(env.unwrapped, skip_render_check=True)
    observation, _ = env.reset(seed=0, options={keys.TRIAL_ID: 0})
    assert observation[keys.STATES].tolist() == [0]
    assert env.action_space.shape == (2,)
    assert [env.step(np.zeros(2, np.float32))[1:3] for _ in range(3)] == [(0, False), (0, False), (1, True)]


def test_what_no_policy_sees_is_among_a_benchmarks_options():
    assert make_toy(unseen=["horizon"]).unseen == ["horizon"]
    with pytest.raises(ValueError, match=r"unknown option of toy 'horizn'.*horizon"):
        make_toy(unseen=["horizn"])


def test_what_gives_no_answer_on_a_busy_machine_is_not_to_be_installed_again(monkeypatch):
    monkeypatch.setattr(
        doctor, "run_probe", lambda code, environment=None: run_probe("import time; time.sleep(9)", None, 0.1)
    )
    finding = doctor.check_extra("metaworld")[-1]
    assert (finding.status, finding.detail) == ("broken", "no answer within 0 s")
    assert "again" in finding.remedy
    assert "pip" not in finding.remedy


def test_wrist_images_are_in_the_spec_or_said_to_be_none():
    for name in ("metaworld/MT50", "libero/spatial", "maniskill/PutOnPlateInScene25Main-v3", "calvin/D"):
        has = make_spec(name).wrist_image_shape is not None
        said = " ".join(sys.modules[f"vla_envs.{name.split('/')[0]}.spec"].__doc__.split())
        assert ("no wrist camera (no ``wrist_images``" in said) is not has, name


def test_a_benchmark_says_how_its_suites_are_written_in_ids():
    register_benchmark(make_toy(suites=("easy-v2", "hard", "kitchen/all of it"), suite_title=str.upper))
    assert {"vla/Toy-EASY-V2-v0", "vla/Toy-HARD-v0", "vla/Toy-KITCHEN_ALL_OF_IT-v0"} <= set(gymnasium.registry)
    assert gymnasium.make("vla/Toy-KITCHEN_ALL_OF_IT-v0").unwrapped.spec.kwargs["name"] == "toy/kitchen/all of it"


@pytest.mark.parametrize("name", ["metaworld", "toy"])
def test_a_name_that_is_taken(name):
    register_benchmark(make_toy())
    with pytest.raises(ValueError, match=f"there is a benchmark '{name}' already; register it under another name"):
        register_benchmark(make_toy(name))


@pytest.mark.parametrize(("name", "title"), [("my/toy", "Toy"), ("", "Toy"), ("toy", "My Toy")])
def test_a_name_that_no_id_can_have(name, title):
    with pytest.raises(ValueError, match="of a benchmark is letters, digits"):
        make_toy(name, title)


@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("toi/hard", "unknown environment 'toi/hard'; did you mean toy/hard"),
        ("hard", "unknown environment 'hard'; did you mean metaworld/hard or toy/hard"),
        ("toy", "unknown environment 'toy'"),
        ("calvin/D_D", "unknown CALVIN suite or task"),
        ("robotwin/place_fan", "RoboTwin's task place_fan cannot be run"),
    ],
)
def test_an_unknown_environment(id, message):
    register_benchmark(make_toy())
    for make in (make_spec, lambda id: make_env(id, 1)):
        with pytest.raises(ValueError, match=message) as error:
            make(id)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("id", "option", "meant"),
    [
        ("toy/hard", "horison", "horizon"),
        ("metaworld/MT50", "img_size", "image_size"),
        ("libero/10", "setle_steps", "settle_steps"),
        ("maniskill/PickCube-v1", "reward_coeff", "reward_coef"),
    ],
)
def test_an_option_that_nobody_reads_offers_the_nearest(id, option, meant):
    register_benchmark(make_toy())
    with pytest.raises(ValueError, match=f"'{option}'; did you mean {meant}"):
        make_env(id, 4, **{option: 64})


# ---- a finished description


def test_a_spec_of_ones_own_runs_in_workers_and_in_gymnasium():
    spec = scripted_spec(REWARDS, [3, 0], action_dim=2)  # its benchmark is registered nowhere
    assert spec.benchmark == "scripted"
    env = make_env(spec, 2, 4, episodes=EpisodeQueue(evaluation_episodes(spec)), num_workers=2, reward_coef=2.0)
    assert env.simulator_spec is spec
    after = env.rollout(1, lambda td: td.set(keys.ACTION, torch.zeros(2, 4, 2)))[keys.NEXT]
    env.close()
    assert after[keys.EPISODE_RETURN].flatten().tolist() == [2.0, 0.0]
    assert after[keys.STEP_MASK][:, 0].tolist() == [[True, True, True, False], [True] * 4]

    gymnasium.register(
        "mine/Scripted-v0", "vla_envs.gym:SimulatorEnv", kwargs={"name": replace(spec, initial_states=2)}
    )
    env = gymnasium.make("mine/Scripted-v0", horizon=1)
    env.reset(seed=0)
    assert env.step(np.zeros(2, np.float32))[3]
    envs = gymnasium.make_vec("mine/Scripted-v0", 2, vectorization_mode="async")
    observation, _ = envs.reset(seed=0)
    envs.close()
    assert observation[keys.IMAGES].shape == (2, 2, 2, 3)
    assert observation[keys.TASK_DESCRIPTIONS] == ("play it back",) * 2


def test_a_worker_finds_a_simulator_in_the_current_folder_and_no_namesake_of_a_module_of_pythons(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("from scripted import Scripted")
    for module in ("ctypes", "random", "runpy"):
        (tmp_path / f"{module}.py").write_text("open('executed', 'w')")
    monkeypatch.chdir(tmp_path)
    spec, ours = scripted_spec(REWARDS, [3, 0], action_dim=2), list(sys.path)
    for entry_point, path in (("scripted:Scripted", ours), ("mine:Scripted", ["", *ours])):  # "" is there in notebooks
        monkeypatch.setattr(sys, "path", path)
        pool = WorkerPool(replace(spec, entry_point=entry_point), 1, 1, 1)
        pool.reset({0: Episode(0, 0)})
        pool.close()
        assert run_probe("import random")[0]
    assert not (tmp_path / "executed").exists()


def test_a_spec_is_complete():
    spec = scripted_spec(REWARDS, [3, 0], action_dim=2)
    with pytest.raises(ValueError, match=r"^image_size, horizon cannot be set beside the SimulatorSpec of scripted"):
        make_env(spec, 1, image_size=64, horizon=2)
    with pytest.raises(ValueError, match="image_size cannot be set beside"):
        gymnasium.make("vla/MetaWorld-reach-v0", name=spec, image_size=64)


def test_a_simulator_in_the_callers_script_says_where_it_has_to_be():
    spec = replace(scripted_spec(REWARDS, [3, 0], action_dim=2), entry_point="__main__:Scripted")
    with pytest.raises(ValueError, match=r"worker processes cannot import __main__.Scripted"):
        make_env(spec, 1)


# ---- a package from outside, in processes of their own

PACKAGE = """
import vla_envs  # which imports us, if it was not imported before
from vla_common.schema import BenchmarkSchema
from vla_envs import Benchmark
from toy_parts import SCHEMA, make_toy_spec

BENCHMARK = Benchmark("toy", "Toy", SCHEMA, make_toy_spec, lambda: ["hard"])
"""


def run_beside(package, program, folder, *options):
    """Output of a program that finds an installed package ``toy_package`` with the entry point ``toy``."""
    (folder / "toy_package").mkdir()
    (folder / "toy_package" / "__init__.py").write_text(package)
    installed = folder / "toy_package-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-package\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[vla_torchrl.benchmarks]\ntoy = toy_package:BENCHMARK\n")
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("first", ["vla_envs", "toy_package", "vla_envs.registry"])
def test_an_installed_benchmark_is_there_whoever_is_imported_first(first, tmp_path):
    program = (
        f"import {first}, vla_envs, gymnasium\n"
        "env = gymnasium.make('vla/Toy-hard-v0')\n"
        "env.reset()\n"
        "print(vla_envs.make_spec('toy/hard').id, 'toy/hard' in vla_envs.list_envs())"
    )
    done = run_beside(PACKAGE, program, make_parts(tmp_path))
    assert done.stdout == "toy/hard True\n"
    assert not done.stderr


def make_parts(folder):
    """What the package needs, without pytest and torch."""
    (folder / "toy_parts.py").write_text(
        "from dataclasses import replace\n"
        "from scripted import scripted_spec\n"
        "from vla_envs.registry import BenchmarkSchema\n"
        "SCHEMA = BenchmarkSchema((2, 2), ('steps',), ('x',), 'play it back')\n"
        "def make_toy_spec(suite):\n"
        "    return replace(scripted_spec([[0.0, 1.0]], [2], action_dim=1), id=f'toy/{suite}', initial_states=1)\n"
    )
    return folder


BROKEN = {
    "an import that fails": ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
    "nothing there": ("", "has no attribute 'BENCHMARK'"),
    "something else": ("BENCHMARK = 3", "must be a Benchmark of that name, not 3"),
    "another name": (PACKAGE.replace('"toy"', '"tot"'), "one of the name 'tot'"),
    "suites that fail": (
        PACKAGE.replace('["hard"]', "1 / 0"),
        "ZeroDivisionError: division by zero",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_package_costs_one_line_and_nothing_else(what, tmp_path):
    package, message = BROKEN[what]
    program = (
        "import vla_envs, gymnasium\n"
        "from vla_envs.doctor import _find_benchmarks\n"
        "print('vla/MetaWorld-reach-v0' in gymnasium.registry, 'metaworld/MT50' in vla_envs.list_envs())\n"
        "print(*[finding.detail for finding in _find_benchmarks()[1]])\n"
    )
    done = run_beside(package, program, make_parts(tmp_path))
    first, doctors = done.stdout.splitlines()
    assert first == "True True"
    assert message in doctors
    said = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert len(said) == 1
    assert message in said[0]
    assert "'toy'" in said[0]


# ---- the doctor


def test_the_doctor_asks_every_benchmark(monkeypatch, capsys):
    def found(status, part, **more):
        return Finding(status, f"toy {part}", "as found", "" if status == "ok" else "repair it", part, **more)

    def fail():
        raise RuntimeError("no such thing")

    monkeypatch.setattr(benchmarks, "_entry_points", {})
    monkeypatch.setattr(benchmarks, "_registered", {})
    register_benchmark(make_toy("fine", "Fine"))
    assert doctor.diagnose() == 0
    assert capsys.readouterr().out.endswith("Usable now: fine\n")
    parts = {
        "half": [found("missing", ASSETS, without="the easy ones")],
        "bare": [found("missing", ASSETS, required=True)],
        "old": [found("broken", "Simulator")],
    }
    for name, findings in parts.items():
        register_benchmark(make_toy(name, name, checks=lambda findings=findings: findings))
    register_benchmark(make_toy("wrong", "Wrong", checks=fail))
    assert doctor.diagnose() == 0
    said = capsys.readouterr().out
    assert said.endswith("Usable now: fine, half (the easy ones), old\n")
    assert "its checks failed: RuntimeError: no such thing" in said
    assert "-> repair it" in said
    register_benchmark(make_toy("blind", "Blind", checks=lambda: [found("broken", RENDERING, required=True)]))
    assert doctor.diagnose() == 1
    assert "blind" not in capsys.readouterr().out.splitlines()[-1]
    assert "blind/<task>" not in said
    assert "fine/hard" in said


# ---- settings


def env_settings(path: Path) -> dict:
    """The ``env`` section that a file of ``recipes/conf/env`` stands for: those that it names, then its own."""
    content = yaml.safe_load(path.read_text()) or {}
    settings = {}
    for name in content.get("defaults", []):
        settings |= env_settings(CONF / "env" / f"{name}.yaml")
    return settings | {k: v for k, v in content.items() if k != "defaults"}


# base.yaml is what the others have in common.
GROUPS = [path for path in (CONF / "env").glob("*.yaml") if path.stem != "base"]


@pytest.mark.parametrize("path", sorted(GROUPS), ids=lambda path: path.stem)
def test_every_configuration_passes_the_annotations(path):
    settings = env_settings(path)
    assert settings["id"] in list_envs() or "+" in settings["id"]
    check_settings("env", settings, env_types(settings["id"]))


@pytest.mark.parametrize(
    ("id", "name", "value", "message"),
    [
        ("metaworld/MT50", "num_envs", -3, "env.num_envs=-3: must be greater than or equal to 1"),
        ("metaworld/MT50", "num_workers", 0, "env.num_workers=0"),
        ("metaworld/MT50", "step_timeout", 0, "env.step_timeout=0: must be greater than 0"),
        ("metaworld/MT50", "relative_reward", "yes", "env.relative_reward=yes: must be a valid boolean"),
        ("metaworld/MT50", "image_size", "x", "env.image_size=x: must be a valid integer"),
        ("metaworld/MT50", "image_size", [64, 0], "entry 1: must be greater"),
        ("metaworld/MT50", "settle_steps", 1.5, "env.settle_steps=1.5: must be a valid integer"),
        ("metaworld/MT50", "render_quality", "fasst", "must be 'benchmark', 'fast', 'minimal' or 'coarse'"),
        ("metaworld/MT50", "camera", {"lookat": [0, 0, 0], "dist": 1}, "'lookat', 'distance'"),
        ("metaworld/MT50", "img_size", 64, "unknown setting 'env.img_size'; did you mean env.image_size"),
        ("metaworld/MT50", "seed", 1, "unknown setting 'env.seed'"),
        ("libero/10", "protocol", "rlnf", "must be 'openvla', 'openpi', 'simplevla', 'rlinf' or 'lerobot'"),
        ("libero/10", "task_ids", [0, -1], "entry 1: must be greater"),
        ("libero/10", "cache_gigabytes", -1, "env.cache_gigabytes=-1"),
        ("maniskill/PickCube-v1", "backend", "gpu", "must be 'processes' or 'cuda'"),
        ("maniskill/PickCube-v1", "only", {"obj": [0]}, "'object', 'plate', 'extra'"),
        ("toy/hard", "horizon", 0, "env.horizon=0: must be greater than or equal to 1"),
    ],
)
def test_wrong_settings_are_refused_as_they_are_typed(id, name, value, message):
    register_benchmark(make_toy())
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace(".", r"\.")):
        check_settings("env", {name: value}, env_types(id))


def test_a_package_that_takes_our_name_is_told_and_does_not_get_it(monkeypatch):
    def declared(package, value):
        return SimpleNamespace(name="metaworld", value=value, dist=SimpleNamespace(name=package))

    points = [declared("shadow", "shadow:BENCHMARK"), declared("vla-torchrl", "vla_envs.metaworld:BENCHMARK")]
    monkeypatch.setattr("vla_common.registry.entry_points", lambda group: points)
    registry = Registry("benchmark", "vla_torchrl.benchmarks")
    with pytest.warns(RuntimeWarning, match=r"vla-torchrl and shadow both declare the benchmark"):
        assert registry.names() == ["metaworld"]
    assert registry._entry_points["metaworld"].value == "vla_envs.metaworld:BENCHMARK"


def test_a_gymnasium_id_that_is_taken_is_said(monkeypatch):
    monkeypatch.setattr(benchmarks, "_registered", dict(benchmarks._registered))
    register_benchmark(make_toy("firsttoy", "SameTitle"))
    with pytest.warns(RuntimeWarning, match=r"the Gymnasium id 'vla/SameTitle-.*' is taken, so secondtoy/.* has none"):
        register_benchmark(make_toy("secondtoy", "SameTitle"))
