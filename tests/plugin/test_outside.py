"""A benchmark and a policy that are installed beside the library work everywhere, with no edit of ours."""

import json
import math
import re
import textwrap

import pytest
from paths import CONF, ROOT

SFT = ["demonstrations.episodes=2", "cloning.steps=3"]
PPO = [*SFT, "policy=toy", "iterations=2", "collector.decisions=3", "update.epochs=1", "update.critic_warmup_steps=0"]
GRPO = [*SFT, "policy=toy", "iterations=2", "group_size=2", "collector.groups=2", "collector.max_groups=2"]


def run(python, code, folder):
    """Run a program that starts worker processes; returns the values that it prints as JSON."""
    path = folder / "program.py"
    indented = textwrap.indent(textwrap.dedent(code), "    ")
    path.write_text(f"import json\n\nif __name__ == '__main__':\n{indented}")
    done = python(path)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] in '[{"']


def test_make_env_knows_the_benchmark_and_its_options(python, tmp_path):
    names, shapes, episodes = run(
        python,
        """
        from torchrl.envs.utils import check_env_specs
        from vla_envs import list_envs, make_env
        env = make_env("toy/discs", num_envs=2, chunk_size=3, num_workers=1, image_size=24, shaped_reward=True)
        check_env_specs(env)
        rollout = env.rollout(2)
        print(json.dumps([name for name in list_envs() if name.startswith("toy/")]))
        print(json.dumps([list(rollout[key].shape) for key in ("images", "states", "action")]))
        print(json.dumps([text for row in rollout["task_descriptions"] for text in row]))
        env.close()
        for wrong in ({"image_sice": 24}, {"suite": 1}):
            try:
                make_env("toy/discs", num_envs=1, **wrong)
            except (TypeError, ValueError):
                continue
            raise SystemExit(f"{wrong} passed")
        """,
        tmp_path,
    )
    assert names == ["toy/discs", "toy/red", "toy/blue"]
    assert shapes == [[2, 2, 24, 24, 3], [2, 2, 2], [2, 2, 3, 2]]
    assert set(episodes) <= {"go to the red disc", "go to the blue disc"}


GYMNASIUM = """
{imports}
import gymnasium
from gymnasium.utils.env_checker import check_env
env = gymnasium.make("{prefix}vla/Toy-discs-v0", image_size=16)
check_env(env.unwrapped, skip_render_check=True)
observation, info = env.reset(seed=1, options={{"task_id": 1, "trial_id": 0}})
print(json.dumps([observation["task_descriptions"], list(observation["images"].shape), info["task_id"]]))
env.close()
envs = gymnasium.make_vec("{prefix}vla/Toy-blue-v0", num_envs=2, vectorization_mode="{mode}")
observations, _ = envs.reset(seed=1)
envs.step(envs.action_space.sample())
print(json.dumps(list(observations["task_descriptions"])))
envs.close()
"""


@pytest.mark.parametrize(
    ("imports", "prefix", "mode"),
    [
        ("", "vla_envs:", "sync"),
        ("import vla_envs", "", "async"),
        ("import toy_benchmark", "", "sync"),  # which imports vla_envs, which looks for toy_benchmark
    ],
)
def test_gymnasium_knows_its_ids(imports, prefix, mode, python, tmp_path):
    code = textwrap.dedent(GYMNASIUM).format(imports=imports, prefix=prefix, mode=mode)
    first, vector = run(python, code, tmp_path)
    assert first == ["go to the blue disc", [16, 16, 3], 1]
    assert vector == ["go to the blue disc"] * 2


def test_an_episode_is_the_same_state_and_pixels_in_any_world(python, tmp_path):
    (same,) = run(
        python,
        """
        import numpy as np
        from vla_envs import Episode, make_spec
        first, second = make_spec("toy/discs").make(), make_spec("toy/red").make()
        first.reset(Episode(1, 5, 3))
        first.step(np.ones(2, np.float32))
        for simulator in (first, second):
            simulator.reset(Episode(0, 7, 3))
            simulator.step(np.float32([0.3, -2.0]))
        one, other = first.observe(), second.observe()
        print(json.dumps([bool((one.images == other.images).all()), bool((one.states == other.states).all())]))
        """,
        tmp_path,
    )
    assert same == [True, True]


@pytest.mark.parametrize("name", ["add_benchmark", "add_policy"])
def test_the_code_of_its_page_runs(name, python, tmp_path):
    if name == "add_policy":
        pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
    page = (ROOT / "examples" / name / "README.md").read_text()
    (tmp_path / "page.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    done = python(tmp_path / "page.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_its_experiments_are_listed_and_compose(python):
    listed = python("-m", "recipes", "list")
    assert listed.returncode == 0, listed.stderr
    assert "toy_ppo  PPO on the toy benchmark" in listed.stdout, listed.stderr
    shown = python(ROOT / "recipes" / "ppo.py", "experiment=toy_ppo", "policy=toy", "--cfg", "job")
    assert shown.returncode == 0, shown.stderr
    assert "id: toy/discs" in shown.stdout, shown.stderr
    assert "iterations: 40" in shown.stdout, shown.stderr


def test_the_doctor_names_it(python):
    report = python("-m", "vla_envs").stdout
    assert "toy/discs" in report
    assert "toy/red" in report
    (usable,) = (line for line in report.splitlines() if line.startswith("Usable now:"))
    assert "toy" in usable


@pytest.fixture(scope="module")
def cloned(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft") / "run"
    return recipe("sft", folder, "policy=toy", *SFT), folder


def test_sft_clones_its_expert_into_the_policy(cloned):
    done, folder = cloned
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "policy" / "config.json").read_text())["policy"] == "toy"
    assert "go-red" in done.stdout
    assert "training reward for coming closer" in done.stdout


@pytest.fixture(scope="module")
def trained(cloned, recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo") / "run"
    return recipe("ppo", folder, *PPO, f"policy.checkpoint={cloned[1] / 'policy'}"), folder


def test_ppo_goes_on_from_the_cloned_policy(trained):
    done, folder = trained
    assert done.returncode == 0, done.stderr
    assert "after PPO" in done.stdout
    assert (folder / "policy" / "model.safetensors").is_file()


def test_grpo_trains_a_new_policy(recipe, tmp_path):
    done = recipe("grpo", tmp_path / "run", *GRPO)
    assert done.returncode == 0, done.stderr
    assert "after GRPO" in done.stdout


def test_evaluate_reads_what_ppo_wrote(trained, recipe, tmp_path):
    policy = trained[1] / "policy"
    done = recipe("evaluate", tmp_path / "run", f"policy.checkpoint={policy}", "ablation=swapped_instructions")
    assert done.returncode == 0, done.stderr
    assert 0 <= json.loads((tmp_path / "run" / "metrics.json").read_text())["eval/success_once"] <= 1


def test_load_policy_reads_what_ppo_wrote(trained, python, tmp_path):
    policy = trained[1] / "policy"
    (found,) = run(
        python,
        f"""
        from vla_policies import load_policy
        policy = load_policy({str(policy)!r})
        print(json.dumps([type(policy).__module__, policy.chunk_size]))
        """,
        tmp_path,
    )
    assert found == ["toy_policy", 3]
    shown = python("-m", "vla_policies", "inspect", policy)
    assert shown.returncode == 0, shown.stderr
    assert "toy" in shown.stdout, shown.stderr


def test_our_policy_learns_there_too(recipe, tmp_path):
    done = recipe("ppo", tmp_path / "run", *PPO, "policy=small")
    assert done.returncode == 0, done.stderr


def test_its_settings_are_refused_by_the_name_that_is_typed(python, tmp_path):
    messages = {
        "env.image_size=-1": "env.image_size=-1",
        "+env.image_sice=16": "did you mean env.image_size",
        "policy.width=0": "policy.width=0",
        "+policy.widths=9": "did you mean policy.width",
        "policy.initial_std=-1": "policy.initial_std=-1",
    }
    found = run(
        python,
        f"""
        from hydra import compose, initialize_config_dir
        from recipes.ppo import SETTINGS
        from vla_algos.run.config import read_config
        with initialize_config_dir({str(CONF)!r}, version_base=None):
            for setting in [[], *([one] for one in {list(messages)})]:
                try:
                    read_config(compose("ppo", ["env=toy", "policy=toy", *setting]), SETTINGS)
                    print(json.dumps([""]))
                except ValueError as error:
                    print(json.dumps([str(error)]))
        """,
        tmp_path,
    )
    assert found[0] == [""]
    for (setting, message), (said,) in zip(messages.items(), found[1:], strict=True):
        assert message in said, f"{setting}: {said}"
        assert "\n" not in said, f"{setting}: {said}"


def test_an_unknown_suite_is_refused_before_any_work(recipe, tmp_path):
    done = recipe("ppo", tmp_path / "run", *PPO, "env.id=toy/disks")
    assert done.returncode != 0
    assert "unknown suite 'disks' of toy; known are discs, red, blue" in done.stderr
    assert "demonstrations:" not in done.stderr


def test_a_vision_model_of_transformers_is_trained_by_ppo(recipe, python, tmp_path):
    """Registered by its entry point: finite losses, and every part of it moves."""
    pytest.importorskip("transformers")
    chosen = [*SFT, "policy=huggingface", "iterations=2", "collector.decisions=3", "update.critic_warmup_steps=0"]
    done = recipe("ppo", tmp_path / "run", *chosen)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [value for row in rows for name, value in row.items() if "loss" in name and value is not None]
    assert losses
    assert all(math.isfinite(value) for value in losses)
    cloned = recipe("sft", tmp_path / "sft", *SFT, "policy=huggingface")
    assert cloned.returncode == 0, cloned.stderr
    (parts,) = run(
        python,
        f"""
        from vla_policies import load_policy
        cloned, trained = (load_policy(path) for path in {[str(tmp_path / name / "policy") for name in ("sft", "run")]})
        before = cloned.state_dict()
        moved = {{name.split(".")[0] for name, value in trained.state_dict().items() if not value.equal(before[name])}}
        print(json.dumps(sorted(moved)))
        """,
        tmp_path,
    )
    assert {"vision", "mean", "log_std", "value_head"} <= set(parts)
