"""Imports are cheap and load no simulator; key names are written in one place. Doors: make lint."""

import ast
import subprocess
import sys

from paths import ROOT

from vla_common import keys

PACKAGES = ("vla_envs", "vla_policies", "vla_algos")
SIMULATORS = ["metaworld", "mujoco", "libero", "robosuite", "mani_skill", "sapien", "pybullet", "robotwin"]
MODELS = ["transformers", "peft", "timm", "torchvision"]
KEYS = {value for name, value in vars(keys).items() if name.isupper()}
KEYS -= {keys.STEP}  # which is a column of metrics.jsonl and a field of checkpoints, too
MODULES = [str(path.relative_to(ROOT)) for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


def run(program: str) -> str:
    """Output of a program in a fresh interpreter."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_import_adds_less_than_a_tenth_to_what_torchrl_costs():
    program = (
        "import time; start = time.process_time(); import torch; from torchrl.envs import EnvBase\n"
        "theirs = time.process_time() - start; import vla_envs; from vla_envs import make_env\n"
        "print(theirs, time.process_time() - start - theirs)"
    )
    runs = [[float(each) for each in run(program).split()] for _ in range(5)]
    theirs, ours = map(min, zip(*runs, strict=True))  # CPU time, which others who use the machine lengthen
    assert ours < 0.1 * theirs, f"{ours:.2f} s beside {theirs:.2f} s of CPU time of importing torch and EnvBase"


def test_imports_load_neither_torch_nor_a_simulator_nor_a_library_of_models():
    program = f"""
import sys
import vla_envs.gym  # LeRobot takes it into an environment with another torch
import vla_policies
print("at first:", *({{'torch', *{MODELS}, *{SIMULATORS}}} & set(sys.modules)))
from torchrl.envs import EnvBase  # TorchRL loads mujoco where it is installed
theirs = set(sys.modules)
from vla_envs import list_envs, make_env, make_spec
make_spec(list_envs()[0])
print("after make_env:", *(set({SIMULATORS}) & (set(sys.modules) - theirs)))
vla_policies.OpenVLA, vla_policies.OpenVLAOFT, vla_policies.load_policy
print("after the policies:", *(set({MODELS}) & set(sys.modules)))
"""
    assert run(program).split("\n")[:3] == ["at first:", "after make_env:", "after the policies:"]


def key_literals(tree: ast.AST) -> list[str]:
    """Keys of the data contract that are written as literals where a tensordict is read or written.

    Looks at ``x[...]``, ``x.get(...)`` and ``x.set(...)``; a simulator's ``info`` has names of its own.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) not in ("info", "Literal"):
            name = node.slice
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("get", "set") and node.args:
            name = node.args[0]
        else:
            continue
        for part in name.elts if isinstance(name, ast.Tuple) else [name]:
            if isinstance(part, ast.Constant) and part.value in KEYS:
                found.append(f"line {part.lineno}: {part.value!r}")
    return found


def test_keys_are_written_in_one_place():
    found = {module: key_literals(ast.parse((ROOT / module).read_text())) for module in MODULES}
    assert not {module: lines for module, lines in found.items() if lines}, "use the names of vla_common.keys"


def test_the_check_of_key_literals_finds_them():
    code = "td['images']; td.get('reward'); td['next', 'done']; td.set(('next', 'x'), 1)"
    assert len(key_literals(ast.parse(code))) == 5
    assert not key_literals(ast.parse("td[keys.IMAGES]; f(images=1); info['success']; td['pixels']"))
