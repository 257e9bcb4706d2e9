"""What takes a setting uses it."""

import ast
import functools
import inspect
import textwrap

import pytest
from paths import RECIPES

from vla_algos.advantages import gae
from vla_algos.collectors import StepCollector
from vla_algos.demonstrations import (
    DemonstrationSettings,
    RecordingSettings,
    record_demonstrations,
    write_demonstrations,
)
from vla_algos.groups import collect_groups
from vla_algos.imitation import BehaviourCloning
from vla_algos.learner import Learner
from vla_algos.losses import ChunkClipPPOLoss
from vla_envs import make_env
from vla_envs.libero.spec import make_spec as make_libero_spec
from vla_envs.maniskill.spec import make_spec as make_maniskill_spec
from vla_envs.metaworld.spec import make_spec
from vla_policies import SmallVLA, SmallVLAConfig
from vla_policies.small.encoder import SmallEncoder
from vla_policies.small.precision import computing

READERS = [gae, ChunkClipPPOLoss, Learner, collect_groups, StepCollector, make_env, make_spec]
READERS += [
    record_demonstrations,
    write_demonstrations,
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


def test_demonstrations_use_each_of_their_settings():
    nodes = list(ast.walk(ast.parse(inspect.getsource(inspect.getmodule(DemonstrationSettings)))))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.value for node in nodes if isinstance(node, ast.Constant)}
    passed_on = set(
        RecordingSettings.__dataclass_fields__
    )  # all of them, to the worker's function, which has no others
    assert set(DemonstrationSettings.__dataclass_fields__) - passed_on <= used


def test_the_small_policy_uses_each_of_its_settings():
    trees = [ast.parse(inspect.getsource(inspect.getmodule(part))) for part in (SmallVLA, SmallEncoder, computing)]
    used = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {field for field in SmallVLAConfig.__dataclass_fields__} <= used
