"""Every key of every configuration does something: a key that no code reads is an error before any work."""

import ast
import functools
import inspect
import textwrap

import openvla_checkpoint
import pi0_checkpoint
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from running import CONF, RECIPES, Started, composed, main_of

import vla_envs.env
from vla_algos.advantages import gae
from vla_algos.collectors import StepCollector
from vla_algos.demonstrations import record_demonstrations, write_demonstrations
from vla_algos.groups import collect_groups
from vla_algos.imitation import BehaviourCloning
from vla_algos.learner import Learner
from vla_algos.losses import ChunkClipPPOLoss
from vla_algos.run import record
from vla_envs import make_env
from vla_envs.libero.spec import make_spec as make_libero_spec
from vla_envs.maniskill.spec import make_spec as make_maniskill_spec
from vla_envs.metaworld.spec import make_spec
from vla_policies import SmallVLA, SmallVLAConfig
from vla_policies.small.encoder import SmallEncoder

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


def recipe_of(experiment):
    return next(name for name in ("evaluate", "grpo", "ppo", "sft") if f"_{name}_" in experiment)


RUNS = [(name, []) for name in ("ppo", "grpo", "sft", "evaluate")]
RUNS += [("ppo", ["policy=small_flow"]), ("ppo", ["policy=pi0", "policy.config_name=pi0_metaworld"])]
RUNS += [("ppo", ["policy=openvla"]), ("grpo", ["policy=openvla_oft", "policy.layout=official"])]
RUNS += [(recipe_of(experiment), [f"experiment={experiment}"]) for experiment in EXPERIMENTS]


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
    return folder


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Composes a recipe's configuration, lets the caller change it, and runs the recipe up to the simulators."""

    def stop(*_, **__):
        raise Started

    monkeypatch.setattr(vla_envs.env, "VLAEnv", stop)
    yield functools.partial(run_checks, folder=tmp_path)
    GlobalHydra.instance().clear()


def overrides_of(name, overrides, folder):
    """What a run needs beside ``overrides``: the folder of a checkpoint, of this family."""
    chosen = next((o for o in overrides if o.startswith(("policy=", "experiment="))), "policy=small")
    kinds = {"openvla": "openvla", "pi05": "pi05", "pi0": "pi0", "openpi": "pi0", "": "policy"}
    kind = next(folder for part, folder in kinds.items() if part in chosen)
    if name != "evaluate" and kind == "policy":
        return overrides
    if chosen.startswith("experiment=") and "_evaluate_" in chosen and chosen.endswith("openpi"):
        benchmark = chosen.removeprefix("experiment=").partition("_")[0].replace("robotwin", "aloha_robotwin")
        overrides = [*overrides, f"policy.config_name=pi0_{benchmark}"]  # not said in a published folder
    if kind == "openvla":
        overrides = [*overrides, "policy.unnorm_key=golden_ds"]  # all that this checkpoint has statistics of
    arms = "_bimanual" if "robotwin" in chosen else ""
    return [*overrides, f"policy.checkpoint={folder / (kind + arms)}"]


def run_checks(name, config, folder):
    main_of(name)(config)


def groups(node, path=()):
    """Paths of all mappings, the outermost too."""
    yield path
    for key, value in node.items():
        if isinstance(value, dict):
            yield from groups(value, (*path, key))


@pytest.mark.parametrize(("name", "overrides"), RUNS, ids=lambda x: x if isinstance(x, str) else "".join(x) or "-")
def test_a_key_that_nobody_reads_is_an_error_wherever_it_stands(name, overrides, check, checkpoints, tmp_path):
    """And with that, a configuration that passes has only keys that somebody takes."""
    config = composed(name, overrides_of(name, overrides, checkpoints), tmp_path)
    with pytest.raises(Started):
        check(name, config)
    for path in groups(OmegaConf.to_container(config)):
        changed = OmegaConf.to_container(config)
        functools.reduce(dict.__getitem__, path, changed)["nobody_reads"] = 1
        with pytest.raises(ValueError, match="nobody_reads"):
            check(name, OmegaConf.create(changed))


READERS = [gae, ChunkClipPPOLoss, Learner, collect_groups, StepCollector, make_env, make_spec]
READERS += [
    record_demonstrations,
    write_demonstrations,
    record,
    BehaviourCloning,
    make_libero_spec,
    make_maniskill_spec,
]


@functools.cache
def attributes_read():
    """Names of all attributes that the library reads."""
    files = RECIPES.parent.glob("vla_*/**/*.py")
    everywhere = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    return {n.attr for n in everywhere if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_what_takes_a_setting_uses_it(reader):
    """Each parameter is read in the body, and where it is only put on ``self``, that is read elsewhere."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(reader)))
    function = next(
        node for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in ("__init__", reader.__name__)
    )  # fmt: skip
    attributes = attributes_read()
    read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    stored = {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    for name in inspect.signature(reader).parameters:
        if name == "options":  # of the benchmark; make_spec has them
            continue
        assert name in read, f"{reader.__name__} never reads {name}"
        assert name not in stored or name in attributes, f"nobody reads {reader.__name__}.{name}"


def test_the_small_policy_uses_each_of_its_settings():
    trees = [ast.parse(inspect.getsource(inspect.getmodule(part))) for part in (SmallVLA, SmallEncoder)]
    used = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {field for field in SmallVLAConfig.__dataclass_fields__} <= used
