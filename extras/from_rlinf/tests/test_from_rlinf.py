"""``vla-from-rlinf``: configurations of RLinf become commands of ours, and each key is accounted for.

No file of RLinf's is here: they are made of recorded values (``golden/rlinf_experiments.json``) and of those below.
"""

import json
import shlex

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from paths import CONF, GOLDEN
from simulators import some

from vla_algos.run.arguments import check_names
from vla_common.experiments import as_typed
from vla_envs import make_spec
from vla_from_rlinf import command, settings, translate

RUNS = json.loads((GOLDEN / "rlinf_experiments.json").read_text())["runs"]
FULL = {  # of every file, and never read or about the machine
    "runner.task_type": "embodied",
    "runner.only_eval": False,
    "runner.max_steps": -1,
    "runner.logger.log_path": "../results",
    "runner.logger.logger_backends": ["tensorboard"],
    "cluster.num_nodes": 1,
    "algorithm.clip_ratio_c": 3.0,
    "algorithm.kl_beta": 0.0,
    "algorithm.loss_agg_func": "token-mean",
    "env.group_name": "EnvGroup",
    "env.train.seed": 0,
    "env.train.video_cfg.save_video": True,
    "env.eval.total_num_envs": 500,
    "rollout.enable_offload": True,
    "actor.seed": 1234,
    "actor.training_backend": "fsdp",
    "actor.fsdp_config.forward_prefetch": False,
    "reward.use_reward_model": False,
}
TYPED = {  # beside checkpoint and evaluate_every=0: where an experiment departs from RLinf, see docs/algorithms.md
    "libero_10_grpo_openvlaoft": {"policy.unnorm_key=libero_10_no_noops"},
    "libero_goal_grpo_openvlaoft": {"policy.unnorm_key=libero_goal_no_noops"},
    "libero_object_grpo_openvlaoft": {"policy.unnorm_key=libero_object_no_noops"},
    "libero_spatial_grpo_openvlaoft": {"policy.unnorm_key=libero_spatial_no_noops"},
    "maniskill_grpo_openvla": {
        "policy.lora_rank=null",
        "policy.dtype=float32",
        "sharding.compute=bf16",
        "optim.lr=1e-05",
    },
    "metaworld_50_grpo_openvlaoft": {"collector.success_bounds=[0.02,0.2]"},
}


def nested(values):
    """Make sections of whole names."""
    found = {}
    for name, value in values.items():
        *sections, key = name.split(".")
        section = found
        for part in sections:
            section = section.setdefault(part, {})
        section[key] = value
    return found


def values_of(name, **changed):
    """Return the keys of a whole file; ``env__train__seed=1`` is ``env.train.seed``, ``None`` leaves one out."""
    values = {**FULL, "actor.model.model_path": f"/models/{name}", **RUNS[name]}
    if "robotwin" in name and "openvlaoft" in name:
        values["actor.model.max_prompt_length"] = 512
    values.update({key.replace("__", "."): value for key, value in changed.items()})
    return {key: value for key, value in values.items() if value is not ...}


def write(folder, name, values, **sections):
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**sections, **nested(values)}, sort_keys=False))
    return path


def main(path):
    return command.main([str(path)], CONF)


def translated(tmp_path, name, **changed):
    return translate(write(tmp_path, name, values_of(name, **changed)), CONF)


def composed(translation):
    check_names(translation.recipe, translation.overrides, CONF)
    return settings.composed(translation.recipe, translation.overrides, CONF)


@pytest.mark.parametrize("name", some(RUNS, 2))
def test_a_run_of_the_guides_is_its_experiment_and_what_that_does_not_take_over(name, tmp_path):
    """The experiments have RLinf's values but for what docs/algorithms.md lists: test_experiments.py."""
    translation = translate(write(tmp_path, name, values_of(name)), CONF)
    assert translation.overrides[0] == f"experiment={name}"
    rest = {f"policy.checkpoint=/models/{name}", "evaluate_every=0"} - (
        {"evaluate_every=0"} if "calvin" in name else set()
    )
    assert set(translation.overrides[1:]) == rest | TYPED.get(name, set())
    keys = translation.keys
    accounted = set(keys.used) | {key for remark in keys.remarks for key in remark.keys}
    assert set(translation.configuration.values) <= accounted
    assert not [remark for remark in keys.remarks if remark.kind == "not known"]


@pytest.mark.parametrize(
    "name", ["libero_10_ppo_openpi_pi05", "robotwin_lift_pot_grpo_openvlaoft", "maniskill_ppo_openvla"]
)
def test_another_number_is_another_command_or_said_to_do_nothing(name, tmp_path):
    """The test above can fail: no number is passed over in silence."""
    before = translated(tmp_path, name)
    silent = {key for remark in before.keys.remarks for key in remark.keys} - set(before.keys.used)
    numbers = [key for key, value in values_of(name).items() if type(value) in (int, float) and key not in silent]
    assert len(numbers) > 15
    settled = {"env.train.init_params.camera_heights", "actor.optim.num_cycles", "actor.model.num_action_chunks"}
    settled |= {"env.train.task_config.step_lim", "runner.max_steps", "algorithm.group_size"}
    settled |= {key for key in numbers if "domain_randomization" in key or "reward_coef" in key}
    for key in set(numbers) - settled:
        value = values_of(name)[key]
        after = translated(tmp_path, name, **{key.replace(".", "__"): value * 2 if value > 0 else 1})
        assert (after.overrides, after.keys.remarks) != (before.overrides, before.keys.remarks), key


def test_values_are_those_of_the_file_whatever_is_chosen_before_them(tmp_path):
    changed = {
        "algorithm__gamma": 0.97,
        "actor__optim__lr": "2e-5",  # YAML 1.1 reads a text, Hydra a number
        "env__train__total_num_envs": 32,
        "env__train__task_suite_name": "libero_goal",
    }
    translation = translated(tmp_path, "libero_10_ppo_openpi", **changed)
    config = composed(translation)
    assert config["recipe"] == "ppo"
    assert config["gae"]["gamma"] == 0.97
    assert config["optim"]["lr"] == 2e-5
    assert config["env"]["num_envs"] == 32
    assert config["env"]["id"] == "libero/goal"
    assert config["env"]["max_episode_steps"] == 480
    assert config["optim"]["max_grad_norm"] == 2.0
    assert config["loss"]["clip_epsilon"] == [0.2, 0.2]


RLINF_130 = {  # of its tasks: LIBERO's list of suites is spatial, object, goal, 90, 10
    0: "pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate",
    29: "put_the_wine_bottle_on_the_rack",
    30: "KITCHEN_SCENE10_close_the_top_drawer_of_the_cabinet",
    35: "KITCHEN_SCENE10_put_the_chocolate_pudding_in_the_top_drawer_of_the_cabinet_and_close_it",
    119: "STUDY_SCENE4_pick_up_the_book_on_the_right_and_place_it_under_the_cabinet_shelf",
    120: "LIVING_ROOM_SCENE2_put_both_the_alphabet_soup_and_the_tomato_sauce_in_the_basket",
    129: "KITCHEN_SCENE6_put_the_yellow_and_white_mug_in_the_microwave_and_close_it",
}


def test_tasks_of_libero_130_have_the_numbers_of_rlinf(tmp_path):
    changed = {"env__train__task_id_filter": list(RLINF_130)}
    env = composed(translated(tmp_path, "libero_130_grpo_openvlaoft", **changed))["env"]
    spec = make_spec(env["id"], task_ids=env["task_ids"])
    assert [task.name for task in spec.tasks] == list(RLINF_130.values())


def test_log_probabilities_that_rlinf_averages_are_summed(tmp_path):
    config = composed(translated(tmp_path, "maniskill_ppo_openpi", actor__model__openpi__num_steps=2))
    assert config["loss"]["clip_epsilon"] == pytest.approx([1 - 0.8**3, 1.2**3 - 1])
    assert config["loss"]["entropy_coeff"] == pytest.approx(0.005 / 3)


def test_an_asynchronous_run_has_a_lag_and_the_dual_clip_that_only_it_reads(tmp_path):
    changed = {
        "algorithm__loss_type": "decoupled_actor_critic",
        "algorithm__staleness_threshold": 2,
        "algorithm__behave_weight_threshold": 5,
    }
    translation = translated(tmp_path, "libero_object_ppo_openpi", **changed)
    assert translation.recipe == "ppo_async"
    assert {"sync.lag=2", "loss.max_behaviour_weight=5", "loss.dual_clip=3.0"} <= set(translation.overrides)
    for written, clip in ((..., "3.0"), (2.0, "2.0"), (None, "null")):  # left out, it is 3 there
        other = translated(tmp_path, "libero_object_ppo_openpi", **changed, algorithm__clip_ratio_c=written)
        assert composed(other)["loss"]["dual_clip"] == yaml.safe_load(clip)


def test_groups_whose_iteration_is_shorter_than_an_episode_have_episodes_as_short(tmp_path):
    config = composed(translated(tmp_path, "libero_10_grpo_openpi", env__train__max_steps_per_rollout_epoch=240))
    assert config["env"]["max_episode_steps"] == 240


def test_roles_on_other_gpus_are_not_translated_and_said(tmp_path):
    name = "metaworld_50_ppo_openpi"
    for placement, kind in (
        ({"env": "0-3", "rollout": "4-7", "actor": "0-7"}, "no counterpart"),
        ({"actor, env, rollout": "0-7"}, "the same"),
    ):
        values = values_of(name) | {"cluster.component_placement": placement}
        remarks = translate(write(tmp_path, name, values), CONF).keys.remarks
        said = {each.kind for each in remarks if "cluster.component_placement." in " ".join(each.keys)}
        assert said == {kind}


def test_runs_of_a_group_that_start_apart_and_strict_bounds_are_pointed_out(tmp_path):
    said = {
        key: each for each in translated(tmp_path, "metaworld_50_grpo_openvlaoft").keys.remarks for key in each.keys
    }
    assert said["env.train.use_fixed_reset_state_ids"].kind == "differs"
    assert "half of the runs" in said["algorithm.rewards_upper_bound"].text
    said = {key: each for each in translated(tmp_path, "libero_10_grpo_openvlaoft").keys.remarks for key in each.keys}
    assert "1 runs alike" in said["env.train.group_size"].text


def test_loggers_are_chosen_with_project_and_name(tmp_path):
    logger = {"runner__logger__project_name": "vla, two", "runner__logger__experiment_name": "first"}
    chosen = {"runner__logger__logger_backends": ["tensorboard", "wandb"], **logger}
    translation = translated(tmp_path, "libero_10_ppo_openpi", **chosen)
    assert "logger=[tensorboard,wandb]" in translation.overrides
    loggers = composed(translation)["logger"]
    assert list(loggers) == ["tensorboard", "wandb"]
    assert (loggers["wandb"]["project"], loggers["wandb"]["name"]) == ("vla, two", "first")
    alone = translated(tmp_path, "libero_10_ppo_openpi", **logger)
    assert not [each for each in alone.overrides if each.startswith("logger")]
    other = translated(tmp_path, "libero_10_ppo_openpi", runner__logger__logger_backends=["mlflow"])
    assert "runner.logger.logger_backends" not in other.keys.used


def test_evaluations_at_another_temperature_are_those_of_eval(tmp_path):
    every = {"runner__val_check_interval": 10}
    at = "rollout__sampling_params__temperature_eval"
    cooler = composed(translated(tmp_path, "libero_10_grpo_openvlaoft", **every, **{at: 0.6}))["eval"]
    assert (cooler["sampled"], cooler["temperature"]) == (True, 0.6)
    alike = composed(translated(tmp_path, "maniskill_ppo_openvla", **every, **{at: 1.0}))["eval"]
    assert (alike["sampled"], alike["temperature"]) == (True, None)
    greedy = composed(translated(tmp_path, "libero_10_grpo_openvlaoft", **every, **{at: -1}))["eval"]
    assert (greedy["sampled"], greedy["temperature"]) == (False, None)


def test_a_key_that_nobody_knows_is_listed(tmp_path, capsys):
    path = write(tmp_path, "mine", values_of("metaworld_50_ppo_openpi", algorithm__curiosity=0.1))
    assert main(path) == 0
    text = capsys.readouterr().out
    assert "algorithm.curiosity" in text.partition("# Not known:")[2].partition("# Translated:")[0]


def test_the_output_is_a_shell_script_of_one_command(tmp_path, capsys):
    values = values_of("libero_10_ppo_openpi", actor__model__model_path="/models/it's mine; $HOME/ü #1")
    assert main(write(tmp_path, "mine", values)) == 0
    script = capsys.readouterr().out
    program, recipe, *overrides = shlex.split(script.replace("\\\n", ""), comments=True)
    assert (program, recipe) == ("python", "recipes/ppo.py")
    check_names("ppo", overrides, CONF)
    assert settings.composed("ppo", overrides, CONF)["policy"]["checkpoint"] == "/models/it's mine; $HOME/ü #1"
    assert "algorithm.clip_ratio_c" in script.partition("# Does nothing in RLinf:")[2].partition("\n#\n")[0]
    assert "#   algorithm.gamma=0.99 -> gae.gamma=0.99\n" in script


def test_no_text_of_the_file_gets_out_of_the_comments(tmp_path, capsys):
    values = values_of("libero_10_ppo_openpi") | {"algorithm.x\ntouch executed #": 1, "env.group_name": "\x1b[2J\ny"}
    values["algorithm.update_epoch"] = 4
    assert main(write(tmp_path, "mine", values)) == 0
    _, _, comments = capsys.readouterr().out.partition("\n\n")
    assert "touch executed" in comments
    assert all(line.startswith("#") and line.isprintable() for line in comments.splitlines())


@pytest.mark.parametrize(
    "value",
    [None, True, 1, 1e-8, 2.5, [0.2, 0.28], ["piper", "piper", 0.6], "a b", "it's", "true", "1e3", "0-7", "a,b=c", "",
     "/models/x-1_b.c", "back\\slash", "(x)", "{a: 1}", "[0]", "a'b\\'c", "end\\",
     {"lookat": [0.0, 0.68], "distance": 1}, {"button-press-v3": [[-0.25], [0.25]]}],
)  # fmt: skip
def test_what_is_typed_is_what_hydra_reads(value):
    (override,) = OverridesParser.create().parse_overrides([f"x={as_typed(value)}"])
    assert override.value() == value


# ---- groups


def in_groups(folder, name="mine", **changed):
    """Write a file whose environment, model and FSDP are in groups beside it, as RLinf has it."""
    values = values_of("libero_10_ppo_openpi", **changed)
    env = {key: values.pop(key) for key in list(values) if key.startswith("env.train.")}
    model = {key: values.pop(key) for key in list(values) if key.startswith("actor.model.")}
    write(folder, "env/libero_10", {key.removeprefix("env.train."): value for key, value in env.items()})
    write(folder, "model/pi0", {key.removeprefix("actor.model."): value for key, value in model.items()})
    defaults = ["env/libero_10@env.train", "model/pi0@actor.model", {"override hydra/job_logging": "stdout"}]
    return write(folder, name, {**values, "env.train.total_num_envs": 16}, defaults=defaults)


def test_groups_beside_the_file_are_merged_and_the_file_counts(tmp_path):
    translation = translate(in_groups(tmp_path), CONF)
    assert "env.num_envs=16" in translation.overrides
    assert composed(translation)["env"]["max_episode_steps"] == 480

    text = (tmp_path / "mine.yaml").read_text().replace("defaults:\n", "defaults:\n- _self_\n")
    (tmp_path / "mine.yaml").write_text(text)
    assert "env.num_envs=16" not in translate(tmp_path / "mine.yaml", CONF).overrides, "the group comes after it"


def test_a_file_alone_is_refused_with_the_group_that_it_needs(tmp_path, capsys):
    alone = tmp_path / "alone.yaml"
    alone.write_text(in_groups(tmp_path / "whole").read_text())
    assert main(alone) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "env/libero_10.yaml, which its defaults name, is not beside it" in line


def test_references_to_other_keys_are_followed_and_what_they_refer_to_counts_as_translated(tmp_path):
    changed = {
        "algorithm__reward_coef": 3.0,
        "env__train__reward_coef": "${algorithm.reward_coef}",
        "actor__model__num_steps": 7,
        "actor__model__openpi__num_steps": "${..num_steps}",
        "actor__model__openpi__action_chunk": "${..num_action_chunks}",
        "env__train__video_cfg__video_base_dir": "${runner.logger.log_path}/video/${oc.env:HOME}",
    }
    translation = translated(tmp_path, "libero_10_ppo_openpi", **changed)
    assert {"env.reward_coef=3.0", "policy.num_steps=7"} <= set(translation.overrides)
    assert translation.keys.used["algorithm.reward_coef"] == ["env.reward_coef"]
    assert translation.keys.used["actor.model.num_steps"] == ["policy.num_steps"]
    shown = translation.configuration.values["env.train.video_cfg.video_base_dir"]
    assert shown == "../results/video/${oc.env:HOME}", "no variable of the machine is read"


# ---- what cannot be translated

OPENPI = "libero_10_ppo_openpi"


@pytest.mark.parametrize(
    ("changed", "needle"),
    [
        ({"runner__task_type": "reasoning"}, "runner.task_type is 'reasoning'"),
        ({"runner__task_type": ...}, "it has no runner.task_type"),
        ({"runner__only_eval": True}, "recipes/evaluate.py"),
        (
            {"env__train__env_type": "behavior"},
            "env.train.env_type=behavior: is not known here; known are calvin, libero",
        ),
        ({"env__train__task_suite_name": "libero_11"}, "env.train.task_suite_name=libero_11"),
        ({"actor__model__model_type": "gr00t"}, "known are openvla, openvla_oft, openpi"),
        ({"algorithm__loss_type": "embodied_sac"}, "algorithm.loss_type=embodied_sac"),
        ({"algorithm__adv_type": "reinpp"}, "algorithm.adv_type=reinpp"),
        ({"actor__model__openpi__noise_anneal": True}, "there is no annealing here; leave it out"),
        ({"actor__model__openpi__ignore_last": True}, "any step may be the stochastic one; leave it out"),
        ({"algorithm__loss_type": "actor"}, "goes with algorithm.adv_type=grpo"),
        ({"algorithm__gamma": "${oc.env:GAMMA}"}, "algorithm.gamma=${oc.env:GAMMA}: only references"),
        ({"algorithm__gamma": "${algorithm.discount}"}, "write the value there"),
        ({"algorithm__gamma": "${algorithm.gamma}"}, "algorithm.gamma=${algorithm.gamma}: only references"),
        ({"algorithm__gamma": "high"}, "algorithm.gamma=high: should be a number"),
        ({"algorithm__gamma": True}, "should be a number"),
        ({"algorithm__gamma": float("nan")}, "should be a number"),
        ({"actor__optim__lr": 0, "actor__optim__lr_scheduler": "cosine"}, "far too large or small"),
        ({"algorithm__gamma": ...}, "has no algorithm.gamma"),
        ({"env__train__total_num_envs": 0}, "env.train.total_num_envs=0: should be a whole number"),
        ({"env__train__total_num_envs": [1, 2]}, "should be a whole number"),
        ({"env__train__auto_reset": "yes"}, "env.train.auto_reset=yes: should be True or False"),
        ({"actor__model__add_value_head": False, "actor__model__openpi__add_value_head": False}, "add_value_head"),
        ({"algorithm__reward_type": "action_level"}, "algorithm.reward_type=action_level: the policy has one value"),
        ({"reward__use_reward_model": True}, "reward.use_reward_model=True"),
        ({"actor__model__openpi__use_dsrl": True}, "actor.model.openpi.use_dsrl=True"),
        ({"actor__model__model_path": "a\nb"}, "should be a text of one line"),
    ],
)
def test_what_cannot_be_translated_is_one_line(changed, needle, tmp_path, capsys):
    path = write(tmp_path, "mine", values_of(OPENPI, **changed))
    assert main(path) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith(f"error: {path}: ")
    assert needle in line
    assert not out


def test_an_unknown_task_of_robotwin_has_the_nearest_name(tmp_path, capsys):
    name = "robotwin_lift_pot_grpo_openvlaoft"
    values = values_of(name, env__train__task_config__task_name="lift_pots")
    assert main(write(tmp_path, name, values)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "env.train.task_config.task_name=lift_pots: unknown task 'lift_pots'; did you mean lift_pot" in line


@pytest.mark.parametrize(
    ("content", "needle"),
    [
        (b"a: [1, 2", "is no YAML that can be read safely"),
        (b"a: !!python/object/apply:os.system ['touch executed']\n", "is no YAML that can be read safely"),
        (b"\xff\xfe\x00\x01", "has no keys"),
        (b"- 1\n- 2\n", "has no keys"),
        (b"", "has no keys"),
        (b"a: 2026-99-99\n", "it has no runner.task_type"),
        (b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
         b"d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\n", "it has aliases"),
        (b"a: &a {b: *a}\n", "it has aliases"),
        (b"defaults: [../../../etc/passwd@env.train]\n", "defaults has"),
        (b"defaults: [{a: b, c: d}]\n", "defaults has"),
        (b"runner: {task_type: embodied}\n", "it has no section env"),
        (b"x: " + b"y" * 1_100_000, "bytes"),
    ],
)  # fmt: skip
def test_what_is_no_configuration_is_one_line(content, needle, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.yaml"
    path.write_bytes(content)
    assert main(path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert needle in line
    assert [each.name for each in tmp_path.iterdir()] == ["file.yaml"], "nothing was executed"


def test_no_file_and_a_folder_are_one_line(tmp_path, capsys):
    assert main(tmp_path / "none.yaml") == 2
    assert main(tmp_path) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "there is no such file" in first
    assert "is a folder" in second


@pytest.mark.parametrize(("nodes", "words"), [(1, ""), (2, " launcher.nodes=2")])
def test_the_commands_for_all_gpus_are_the_command_and_how_it_is_started(nodes, words, tmp_path):
    lines = list(translated(tmp_path, "libero_10_ppo_openpi", cluster__num_nodes=nodes).lines())
    command = lines[0].replace(" \\\n    ", " ")
    [torchrun, job] = [line for line in lines if line.startswith("#   ") and "recipes/ppo.py experiment=" in line]
    assert torchrun.endswith(command.removeprefix("python "))
    assert ("--nnodes 2" in torchrun) is (nodes == 2)
    assert job == f"#   {command} launcher=slurm_8gpus launcher.partition=NAME{words}"
