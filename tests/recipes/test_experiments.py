"""Every experiment composes and is checked before any work, in training and in evaluation; names of the guides work."""

import functools
import importlib
import json
import re
import subprocess
import sys

import lerobot_checkpoint
import openvla_checkpoint
import pi0_checkpoint
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from paths import CONF, GOLDEN, ROOT
from running import Started, composed, main_of
from simulators import SLOW

import vla_envs.make
from vla_algos.run.arguments import check_arguments, check_names, compose_settings
from vla_algos.run.config import read_config
from vla_algos.run.environments import evaluated_env, make_env_spec
from vla_algos.run.evaluator import Evaluator
from vla_algos.run.training_env import evaluation_defaults
from vla_common.experiments import find_experiments
from vla_policies import SmallVLA, SmallVLAConfig
from vla_policies.tiny import make_tiny

EXPERIMENTS = find_experiments(CONF)
FILES = [name for name, experiment in EXPERIMENTS.items() if not experiment.suite]
ROWS = [name for name, experiment in EXPERIMENTS.items() if experiment.suite]
PUBLISHED = [name for name in FILES if "_small" not in name]  # policies, which begin with a checkpoint
GUIDE = json.loads((GOLDEN / "rlinf_experiments.json").read_text())["runs"]


def settings_of(recipe):
    return importlib.import_module(f"recipes.{recipe}").SETTINGS


def evaluation(*typed):
    return compose_settings("evaluate", evaluation_defaults(typed, CONF), CONF)


def test_there_are_few_files_and_each_explains_itself():
    assert len(FILES) <= 34
    for name in FILES:
        head = EXPERIMENTS[name].file.read_text().partition("\ndefaults:")[0]
        assert f"experiment={name}" in head, "the head of an experiment says how to run it"


def test_the_names_of_the_guides_work():
    assert GUIDE.keys() <= EXPERIMENTS.keys()
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
    named = set(re.findall(r"experiment=(\w+)", pages)) - {"mine", "toy_ppo", "NAME", "libero_"}
    assert named <= EXPERIMENTS.keys()


@pytest.mark.parametrize("name", [*FILES, *ROWS])
def test_every_experiment_is_checked_without_work(name):
    experiment = EXPERIMENTS[name]
    config = read_config(
        compose_settings(experiment.recipe, [f"experiment={name}"], CONF), settings_of(experiment.recipe)
    )
    assert experiment.suite in ("", config.env["id"])
    assert make_env_spec(config.env).id == config.env["id"]
    evaluated_on = make_env_spec(evaluated_env(config.env, config.eval), "eval.env")
    assert Evaluator(**config.eval).episodes(evaluated_on)


@pytest.mark.parametrize("name", FILES)
def test_every_experiment_can_be_evaluated(name):
    evaluated = read_config(evaluation(f"experiment={name}", "policy.checkpoint=x"), settings_of("evaluate"))
    assert evaluated.policy["checkpoint"] == "x"
    assert Evaluator(**evaluated.eval).episodes(make_env_spec(evaluated.env))


def test_a_row_is_its_file_with_the_environment():
    by_name = compose_settings("ppo", ["experiment=libero_10_ppo_openpi_pi05"], CONF)
    by_id = compose_settings("ppo", ["experiment=libero_ppo_openpi_pi05", "env.id=libero/10"], CONF)
    assert by_name == by_id
    assert (by_name.env.max_episode_steps, by_name.policy.num_action_chunks, by_name.optim.final_lr) == (480, 10, 0.1)
    other = compose_settings("ppo", ["experiment=libero_10_ppo_openpi", "env.id=libero/goal", "optim.lr=1"], CONF)
    assert (other.env.max_episode_steps, other.collector.decisions, other.optim.lr) == (None, 512, 1)


def test_an_environment_without_a_row_is_refused_by_name():
    config = compose_settings("ppo", ["experiment=libero_ppo_openpi", "env.id=libero/gaol"], CONF)
    with pytest.raises(ValueError, match=r"unknown env.id of this experiment 'libero/gaol'; did you mean libero/goal"):
        read_config(config, settings_of("ppo"))


def test_an_evaluation_is_the_protocols_where_the_experiment_has_one(capsys):
    found = evaluation("experiment=libero_10_grpo_openvlaoft", "policy.checkpoint=x", "env.num_envs=8")
    assert (found.greedy, found.eval.repeats, found.env.id, found.env.num_envs) == (False, 2, "libero/10", 8)
    assert (found.env.max_episode_steps, found.policy.temperature) == (512, 1.6)
    greedy = evaluation("experiment=libero_10_grpo_openvlaoft", "policy.checkpoint=x", "greedy=true", "eval.repeats=1")
    assert (greedy.greedy, greedy.eval.repeats) == (True, 1)
    other = evaluation("experiment=libero_ppo_openpi", "env.id=libero/10", "policy.checkpoint=x")
    assert (other.env.max_episode_steps, other.policy.method, other.policy.num_steps) == (480, "flow_ode", 4)
    assert not capsys.readouterr().err


def test_unknown_experiments_and_those_of_another_recipe_are_refused():
    config = compose_settings("ppo", ["experiment=libero_10_grpo_openpi"], CONF)
    with pytest.raises(ValueError, match=r"grpo\.py"):
        read_config(config, settings_of("ppo"))
    with pytest.raises(
        ValueError, match="unknown experiment 'libero_10_ppo_openpy'; did you mean libero_10_ppo_openpi"
    ):
        check_arguments(["experiment=libero_10_ppo_openpy"], CONF)
    check_arguments(["--config-dir", "elsewhere", "experiment=mine"], CONF)
    check_arguments(["experiment=null", "seed=1"], CONF)
    check_arguments(["experiment=metaworld_faucets_ppo_small,metaworld_mt50_ppo_small"], CONF)


def test_a_setting_that_is_typed_twice_is_said(capsys):
    check_arguments(["seed=1", "optim.lr=1e-4", "seed=2"], CONF)
    assert capsys.readouterr().out == "warning: seed is typed 2 times; seed=2 counts\n"


def test_the_asynchronous_recipe_has_the_values_of_ppo():
    theirs, ours = (compose_settings(name, [], CONF) for name in ("ppo", "ppo_async"))
    assert ours.keys() - theirs.keys() == {"placement", "sync"}
    assert theirs.keys() - ours.keys() == {"train_videos", "self_imitation"}
    assert {name for name in theirs.keys() & ours.keys() if theirs[name] != ours[name]} == {"recipe"}


RUNS = [(name, []) for name in ("ppo", "grpo", "rs", "dagger", "dsrl", "sac", "sft", "evaluate")]
RUNS += [("ppo", ["policy=small_flow"]), ("ppo", ["policy=pi0", "policy.config_name=pi0_metaworld"])]
RUNS += [("ppo", ["policy=openvla"]), ("grpo", ["policy=openvla_oft", "policy.layout=official"])]
OF_EXPERIMENTS = [(EXPERIMENTS[name].recipe, [f"experiment={name}"]) for name in FILES]
OF_EXPERIMENTS += [("evaluate", [f"experiment={name}"]) for name in PUBLISHED if "libero" in name]
OF_EXPERIMENTS += [
    (
        recipe,
        [f"experiment=libero_{recipe}_lerobot", "policy=pi0_lerobot", "policy.lora_rank=4", "policy.dtype=bfloat16"],
    )
    for recipe in ("ppo", "grpo")
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with a small checkpoint of each family."""
    folder = tmp_path_factory.mktemp("checkpoints")
    SmallVLA(SmallVLAConfig((-1.0,) * 4, (1.0,) * 4, 4)).save_pretrained(folder / "policy")
    openvla_checkpoint.make_checkpoint(folder / "openvla")
    openvla_checkpoint.make_bimanual(folder / "openvla_bimanual", key="golden_ds")
    pi0_checkpoint.make_checkpoint(folder / "pi0", horizon=50)
    pi0_checkpoint.make_checkpoint(folder / "pi05", "pi05_tiny", horizon=10)
    pi0_checkpoint.make_bimanual(folder / "pi0_bimanual")
    pi0_checkpoint.make_bimanual(folder / "pi05_bimanual", "pi05_tiny")
    lerobot_checkpoint.make_checkpoint(folder / "pi0_lerobot", lerobot_checkpoint.PI0, chunk_size=10)
    make_tiny("smolvla", folder / "libero")
    make_tiny("smolvla_metaworld", folder / "metaworld")
    return folder


@pytest.fixture
def started(monkeypatch):
    """Runs of recipes end where they would start simulators."""

    def stop(*_, **__):
        raise Started

    monkeypatch.setattr(vla_envs.make, "VLAEnv", stop)
    yield
    GlobalHydra.instance().clear()


def overrides_of(name, overrides, folder):
    """What a run needs beside ``overrides``: the folder of a checkpoint, of this family."""
    chosen = next((o for o in reversed(overrides) if o.startswith(("policy=", "experiment="))), "policy=small")
    kinds = {"openvla": "openvla", "pi05": "pi05", "pi0_lerobot": "pi0_lerobot", "pi0": "pi0", "openpi": "pi0"}
    kinds |= {"libero_ppo_lerobot": "libero", "libero_grpo_lerobot": "libero", "smolvla": "metaworld", "": "policy"}
    kind = next(folder for part, folder in kinds.items() if part in chosen)
    if name != "evaluate" and kind == "policy":
        return overrides
    if kind == "openvla":
        overrides = [*overrides, "policy.unnorm_key=golden_ds"]  # all that this checkpoint has statistics of
    if kind == "pi0_lerobot":
        overrides = [*overrides, "policy.max_prompt_length=64"]  # its tokenizer spells
    arms = "_bimanual" if "robotwin" in chosen else ""
    return [*overrides, f"policy.checkpoint={folder / (kind + arms)}"]


def groups(node, path=()):
    """Paths of all mappings, the outermost too."""
    yield path
    for key, value in node.items():
        if isinstance(value, dict):
            yield from groups(value, (*path, key))


def as_words(value):
    return value if isinstance(value, str) else "".join(value) or "-"


@pytest.mark.parametrize(("name", "overrides"), OF_EXPERIMENTS, ids=as_words)
def test_every_experiment_comes_as_far_as_its_simulators(name, overrides, started, checkpoints, tmp_path):
    """With that, it has only keys that some callable takes."""
    typed = overrides_of(name, overrides, checkpoints)
    with pytest.raises(Started):
        main_of(name)(composed(name, evaluation_defaults(typed, CONF) if name == "evaluate" else typed, tmp_path))


@pytest.mark.parametrize(("name", "overrides"), RUNS, ids=as_words)
def test_a_key_that_nobody_reads_is_an_error_wherever_it_stands(name, overrides, started, checkpoints, tmp_path):
    typed = overrides_of(name, overrides, checkpoints)
    config = composed(name, typed, tmp_path)
    with pytest.raises(Started):
        main_of(name)(config)
    tables = ("suites", "evaluation")  # not read in a run of training
    for path in groups({key: value for key, value in OmegaConf.to_container(config).items() if key not in tables}):
        changed = OmegaConf.to_container(config)
        functools.reduce(dict.__getitem__, path, changed)["nobody_reads"] = 1
        with pytest.raises(ValueError, match="nobody_reads"):
            main_of(name)(OmegaConf.create(changed))


@pytest.mark.parametrize("recipe", ["ppo", "grpo", "ppo_async", "rs", "dagger", "dsrl", "sac", "sft", "evaluate"])
def test_our_files_have_all_settings_that_there_are(recipe):
    """So that a name that they do not have can be refused without the code that reads it."""
    chosen_by = {"env": "id", "policy": "family", "launcher": "name"}
    files = [f"{group}={path.stem}" for group in chosen_by for path in (CONF / group).glob("*.yaml")]
    for typed in files if SLOW or recipe in ("ppo", "evaluate") else ["seed=0"]:
        settings = OmegaConf.to_container(compose_settings(recipe, [typed], CONF), resolve=False)
        if settings["env"].get("id") is None:
            continue
        for section, types in settings_of(recipe).items():
            if section in chosen_by:
                types = types(settings[section][chosen_by[section]])
            if isinstance(types, dict) and section not in ("logger", "eval"):
                assert types.keys() <= settings[section].keys(), (typed, section)


@pytest.mark.parametrize(
    ("recipe", "typed", "message"),
    [
        ("ppo", "updaet.epochs=2", "unknown setting 'updaet.epochs'; did you mean update.epochs"),
        ("ppo", "optim.lrr=1", "unknown setting 'optim.lrr'; did you mean optim.lr"),
        ("ppo", "env.img_size=3", "did you mean env.image_size"),
        ("ppo", "launcher.gpus=2", "unknown setting 'launcher.gpus'"),
        ("ppo", "experimnt=x", "did you mean experiment"),
        ("evaluate", "pipeline.stage=2", "did you mean pipeline.stages"),
        ("sft", "gae.gamma=0.9", "unknown setting 'gae'; known are"),
    ],
)
def test_unknown_names_are_refused_by_name(recipe, typed, message):
    with pytest.raises(ValueError, match=message):
        check_names(recipe, [typed], CONF)


@pytest.mark.parametrize(
    ("recipe", "typed"),
    [
        ("ppo", ["optim.lr=1e-4", "policy.dim=32", "seed=3", "hydra.run.dir=x", "eval.env.num_envs=2"]),
        (
            "ppo",
            ["launcher=slurm", "launcher.gpus=2", "env=libero", "env.assets=x", "policy=pi0", "policy.checkpoint=x"],
        ),
        ("ppo", ["experiment=libero_10_ppo_openpi", "+optim.mine=1", "logger=[wandb]", "logger.wandb.project=a"]),
        ("ppo", ["-m", "optim.mine=1,2"]),
        ("ppo", ["-sc", "install=bash"]),
        ("ppo", ["--config-dir", "mine", "optim.mine=1"]),
        ("evaluate", ["experiment=libero_10_ppo_openpi", "env.id=libero/goal", "policy.checkpoint=x", "env.any=1"]),
    ],
)
def test_what_may_be_known_elsewhere_is_left_to_those_who_read_it(recipe, typed):
    check_names(recipe, typed, CONF)


def test_a_name_is_refused_before_torch_is_imported():
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['ppo.py', 'optim.lrr=1']\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT / 'recipes/ppo.py')!r}, run_name='__main__')\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
    assert done.stderr == "error: unknown setting 'optim.lrr'; did you mean optim.lr?\n"
