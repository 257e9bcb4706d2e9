"""Names of earlier versions work for one more version, and say what they are called now."""

import importlib
import subprocess
import sys

import pytest

from vla_algos.run.arguments import RENAMED, translated
from vla_common.moved import MOVED


@pytest.mark.parametrize("old", sorted(MOVED))
def test_a_module_is_found_by_its_old_name(old):
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is called {MOVED[old]} now"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED[old])
    assert module.__spec__.name == MOVED[old]


def test_names_are_imported_from_modules_that_have_moved():
    program = (
        "from vla_policies.tokens import ActionBins; import vla_algos.distributed as distributed\n"
        "from vla_envs.options import check_name; from vla_policies.small import SmallVLA\n"
        "print(ActionBins.__module__, distributed.__name__, check_name.__module__, SmallVLA.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        *("vla_policies.processing.action_tokens", "vla_algos.parallel"),
        *("vla_common.validation", "vla_policies.small.token_policy"),
    ]


def test_key_of_crashed_episodes():
    import vla_keys

    with pytest.warns(DeprecationWarning, match="CRASHED"):
        assert vla_keys.LOST == vla_keys.CRASHED == "crashed"
    with pytest.raises(AttributeError, match="NONSENSE"):
        _ = vla_keys.NONSENSE


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_a_setting_is_translated_and_said(old, capsys):
    typed, expected = (old, RENAMED[old]) if "=" in old else (f"{old}=1", f"{RENAMED[old]}=1")
    assert translated([typed]) == [expected]
    assert f"{old} is called {RENAMED[old]} now" in capsys.readouterr().err
    if "=" not in old:
        assert translated([f"+{old}=[1,2]", f"~{old}"]) == [f"+{RENAMED[old]}=[1,2]", f"~{RENAMED[old]}"]


def test_other_arguments_stay_as_they_are(capsys):
    arguments = [
        "seed=1",
        "experiment=x",
        "-m",
        "--config-dir",
        "folder",
        "env.camera={eye: [1, 2]}",
        "hydra.run.dir=a b",
    ]
    assert translated(arguments) == arguments
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "advice"), [("--seed", "seed=1"), ("seed", "seed=1"), ("--seed=1", "seed=1"), ("1", "name=value")]
)
def test_what_is_no_setting_is_one_line(argument, advice):
    with pytest.raises(ValueError, match=r"is no setting; type name=value.*") as error:
        translated([argument])
    assert advice in str(error.value)
