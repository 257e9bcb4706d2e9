"""The command ``vla-recipe``: what it lists, copies, refuses and becomes. The installed one is in e2e/test_wheel.py."""

import os
import sys

import forked
import pytest
from paths import CONF, RECIPES

from recipes.__main__ import main


def test_list_names_each_recipe_and_what_each_experiment_is(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("ppo", "grpo", "rs", "dagger", "dsrl", "sac", "sft", "evaluate"):
        assert any(line.split()[:1] == [name] and len(line.split()) > 3 for line in lines), name
    for path in (CONF / "experiment").glob("*.yaml"):
        (line,) = (line for line in lines if line.split()[:1] == [path.stem])
        assert len(line.split()) > 4
        assert "@package" not in line
    assert not any(line.split()[:1] == ["__main__"] for line in lines)


def test_a_copy_has_the_recipe_and_every_configuration_group(tmp_path, capsys):
    assert main(["copy", "ppo", "--to", str(tmp_path / "new")]) == 0
    copied = {path.relative_to(tmp_path / "new") for path in (tmp_path / "new").rglob("*") if path.is_file()}
    assert copied == {path.relative_to(RECIPES) for path in [RECIPES / "ppo.py", *CONF.rglob("*.yaml")]}
    assert (tmp_path / "new" / "ppo.py").read_bytes() == (RECIPES / "ppo.py").read_bytes()
    assert "python ppo.py" in capsys.readouterr().out


def test_what_was_changed_is_not_overwritten_unless_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["copy", "ppo"]) == 0
    assert main(["copy", "grpo", "--to", "my_ppo"]) == 0, "the same configuration again overwrites nothing"
    changed = tmp_path / "my_ppo" / "conf" / "env" / "base.yaml"
    changed.write_text("id: mine\n")
    (tmp_path / "my_ppo" / "sft.py").write_text("mine")
    capsys.readouterr()
    assert main(["copy", "sft", "--to", "my_ppo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "sft.py and 1 more would be overwritten" in line
    assert "--force" in line
    assert "--to FOLDER" in line
    assert changed.read_text() == "id: mine\n"
    assert main(["copy", "sft", "--to", "my_ppo", "--force"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["my_ppo"]
    assert changed.read_bytes() == (CONF / "env" / "base.yaml").read_bytes()


def test_the_command_alone_shows_its_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert "copy a recipe and its configuration" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["run", "copy"])
def test_a_misspelt_recipe_is_one_line_with_the_nearest_name(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([command, "ppoo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: unknown recipe 'ppoo'; did you mean ppo")
    assert not list(tmp_path.iterdir())


def test_run_becomes_the_recipe_with_its_settings(monkeypatch):
    became = []
    monkeypatch.setattr(os, "execv", lambda *call: became.append(call))
    settings = ["-m", "seed=1,2", "+x=3", "--help"]
    main(["run", "grpo", *settings])
    ((program, arguments),) = became
    assert program == sys.executable
    assert arguments == [sys.executable, str(RECIPES / "grpo.py"), *settings]


def test_help_of_a_recipe_is_hydras_from_any_folder(tmp_path):
    done = forked.run("ppo", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "experiment: " in done.stdout
    assert "metaworld_button" in done.stdout
