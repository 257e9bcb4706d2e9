"""What a user types wrong is one line ``error: ...`` and status 2, before any simulator starts; the words of each line.

The line says what is wrong, what would be right, and what to type; where no words are given it has Hydra's.
"""

import os
import re
import shutil

import forked
import pytest
from lerobot_checkpoint import change_json
from openvla_checkpoint import make_checkpoint
from paths import ROOT
from pi0_checkpoint import make_checkpoint as make_pi0_checkpoint
from running import recipe_here

from vla_algos.run import program
from vla_algos.run.checkpoints import CheckpointError
from vla_common.program import FAILED, INTERRUPTED, WRONG_USE, one_line, report
from vla_policies import SmallVLA, SmallVLAConfig
from vla_policies.tiny import make_tiny

NAMES = [  # what is typed, and the words that the line has
    ("ppo launcher=slurmm", "unknown launcher 'slurmm'; did you mean slurm"),
    ("ppo policy=smallflow", "unknown policy 'smallflow'; did you mean small_flow"),
    ("ppo env=nope", "unknown env 'nope'; known are calvin, "),
    ("ppo env=maniskill_push_cube env.camera=[0,0,1]", r"camera=\[0,0,1\]: Cannot merge DictConfig with ListConfig"),
    ("ppo policy.type=small_flow", r"unknown setting 'policy\.type'; did you mean policy\.family"),
    ("ppo device=cuda", "unknown setting 'device'; known are"),
    ("ppo policy.device=cuda", r"unknown setting 'policy\.device'; known are"),
    ("ppo env.task=reach-v3", r"unknown setting 'env\.task'; did you mean env\.id"),
    ("ppo launcher.hours=3", r"unknown setting 'launcher\.hours'; known are launcher\.name"),
    ("ppo launcher=slurm launcher.hours=3", r"unknown setting 'launcher\.hours'; did you mean launcher\.minutes"),
    ("ppo max_steps=3", "unknown setting 'max_steps'; did you mean iterations or demonstrations"),
    ("ppo optim.lr=100", r"optim\.lr=100: must be less than 1$"),
    ("ppo experiment=metaworld_faucet_ppo", "unknown experiment .* did you mean metaworld_faucets_ppo_small"),
    ("ppo polcy=small", "unknown setting 'polcy'; did you mean policy"),
    ("ppo optim.lrr=1", r"unknown setting 'optim\.lrr'; did you mean optim\.lr"),
    ("ppo +optim.learning_rate=1", r"unknown setting 'optim\.learning_rate'; did you mean optim\.lr\?"),
    ("ppo +env.img_size=3", r"unknown setting 'env\.img_size'; did you mean env\.image_size"),
    ("ppo launcher=slurm launcher.gpu=1", r"did you mean launcher\.gpus"),
    ("ppo logger=[tensorboard,wandb] logger.wandb.mod=x", r"did you mean logger\.wandb\.mode"),
    ("ppo experimnt=x", ""),
    ("sft sfft=expert", ""),
    ("evaluate logger=wandb", ""),
    ("ppo policy.lora_rank=8", ""),
    ("ppo env.id=reach-v3", "did you mean metaworld/reach-v3"),
    ("ppo env.id=libero/spatial", ""),
    ("ppo policy.family=pi0", ""),
    ("ppo pipeline.stages=3 env.num_envs=4", r"stages=3: num_envs=4 cannot be divided.* such as num_envs=6"),
    ("ppo pipeline.stages=32", r"stages=32: num_envs=16 cannot be divided.* such as num_envs=32"),
    ("grpo pipeline.stages=2 env.num_envs=4 env.num_workers=4", "take num_workers=2 or fewer, or num_envs=8 or more"),
    ("ppo pipeline.overlap_resets=true", ""),
    ("ppo pipeline=2", r"is a section; type one of its settings: pipeline\.NAME=VALUE"),
    ("ppo eval={trials:5,episodes:3}", ""),
    ("ppo seed.x=1", ""),
    ("ppo --config-dir . optim.lrr=1", r"did you mean optim\.lr"),
    ("ppo -cn nope", ""),
]
OTHER_ALGORITHM = [
    ("ppo experiment=libero_10_grpo_openpi", ""),
    ("ppo group_size=4", ""),
    ("grpo gae.gamma=0.9", ""),
    ("ppo greedy=true", ""),
    (
        "evaluate optim.lr=1e-4",
        "",
    ),
    ("evaluate eval.temperature=0.6", ""),
]
GRAMMAR = [
    ("ppo seed 1", ""),
    ("ppo +optim.lr=1", ""),
    ("ppo +env=libero", ""),
    ("ppo policy=[a", ""),
    ("ppo env.id=metaworld/réach-v3", ""),
    ("ppo seed=${nope}", "seed: [Ii]nterpolation key 'nope' not found"),
    ("ppo policy.checkpoint=", ""),
    ("ppo ~seed", "seed is missing; type seed=VALUE"),
]
FLAGS = [
    ("ppo -cp /nope", "Check that the config directory '/nope' exists"),
    ("ppo --resolve", "only be used in conjunction with --cfg"),
]
VALUES = [
    ("ppo optim.lr=abc", r"optim\.lr=abc: must be a valid number"),
    ("ppo seed=null", "seed=null: must be a valid integer"),
    ("ppo env.num_envs=2 env.num_workers=100", "num_workers must be between 1 and num_envs=2"),
    ("ppo_async placement.actor=0-7", r"placement\.actor=0-7: there is no 7, but 1 GPU, .*or start more processes"),
    ("ppo_async placement.rollout=one", r"placement\.rollout=one: 'one' is no number and no range"),
    ("ppo_async placement.actor=3-1", r"placement\.actor=3-1: 3-1 descends; type placement\.actor=1-3"),
    ("ppo_async placement.actor=null", r"placement\.actor is empty; type placement\.actor=0-3"),
    ("ppo_async placement.actors=all", "actors"),
    ("ppo_async sync.lag=-1", r"sync\.lag=-1: must be greater than or equal to 0"),
    ("ppo loss.decoupled=true", "unknown setting 'loss.decoupled'"),
    ("ppo loss.max_behaviour_weight=2", r"max_behaviour_weight=2.*decoupled"),
    ("ppo env.gpus=[]", r"env\.gpus=\[\]: "),
    ("ppo env.gpus=[-1]", r"env\.gpus=\[-1\]: entry 0: must be greater than or equal to 0"),
    ("ppo env.gpus=[99]", r"gpus=\[99\]: CUDA shows .*env\.gpus"),
    ("ppo env.num_envs=3 env.group_size=4", "num_envs=3 is not a multiple of group_size=4; try num_envs=4"),
    ("ppo optim.lr=nan", r"optim\.lr=.*finite"),
    ("ppo launcher=slurm launcher.minutes=long", r"launcher\.minutes=long: must be a valid integer"),
    ("ppo launcher=slurm launcher.minutes=null", r"launcher\.minutes=null: must be a valid integer"),
    ("ppo launcher=local launcher.name=slurm", "type launcher=slurm, which sets all of them"),
]
FILES = [  # {place} is a folder of wrong checkpoints
    ("evaluate", r"which policy\? type: vla-recipe run evaluate policy\.checkpoint=runs/ppo/latest/policy"),
    (
        "ppo policy.checkpoint={place}/nope",
        "no folder .*nope; pass a checkpoint folder, or a repository of the hub as hf:NAME",
    ),
    ("ppo policy.checkpoint={place}/empty", r"is not a policy folder: it has no config\.json; pass"),
    (
        "ppo policy.checkpoint={place}/rlinf",
        "is a pickle; convert it with RLinf's python -m .*and pass NEW",
    ),
    ("ppo policy.checkpoint={place}/run", r"is not a policy folder.*type that of its policy: .*/run/policy"),
    ("ppo policy.checkpoint={place}/evaluation", r"is not a policy folder: it has no config\.json; pass"),
    ("ppo policy.checkpoint={place}/unfinished", "has not finished, and no policy yet; type its command again"),
    ("ppo policy.checkpoint={place}/cut", r"has another model\.safetensors than was written.*copy the folder again"),
    ("ppo policy.checkpoint={place}/broken", r"has another config\.json than was written.*copy the folder again"),
    ("ppo policy.checkpoint={place}/file", "file is a file; pass the checkpoint folder"),
    (
        "ppo policy.checkpoint={place}/small policy.chunk_size=10",
        r"was trained with chunk_size=5.*leave chunk_size out",
    ),
    ("ppo policy.checkpoint={place}/small policy.dim=999", "was trained with dim=128.*leave dim out"),
    ("evaluate {libero} policy=openvla_oft policy.checkpoint={place}/pi0", "is a checkpoint of pi0.*type policy=pi0"),
    (
        "evaluate {libero} policy=pi0 policy.checkpoint={place}/openvla",
        "checkpoint of openvla, not of pi0; type policy=",
    ),
    ("evaluate {libero} policy=openvla policy.checkpoint=hf:openvla/openvla-7b", "hf download openvla/openvla-7b"),
    ("evaluate policy.checkpoint={place}/openvla", "recipes: policy=openvla"),
    ("ppo hydra.run.dir={place}/file", ""),
    ("ppo hydra.run.dir=/proc/x", ""),
]
ENVIRONMENT = [
    ("MUJOCO_GL=bogus ppo", "MUJOCO_GL=bogus: .*type MUJOCO_GL=egl .*MUJOCO_GL=osmesa"),
    ("ppo {libero}", "libero/spatial has no scripted expert.*type demonstrations.episodes=0"),
    (
        "HOME=/nope VLA_TORCHRL_ASSETS=/nope ppo {libero} demonstrations.episodes=0",
        "no LIBERO assets.*Type: python -m vla_envs fetch libero-assets",
    ),
]
SHORT = {
    "libero": "env=libero eval.trials=null",
    "calvin": "env=calvin env.id=calvin/open_drawer",
    "lh-mtlc": "env=calvin_lh_mtlc demonstrations.episodes=0",
    "robotwin": "env=robotwin demonstrations.episodes=0",
    "plate": "env=maniskill_small demonstrations.episodes=0",
    "pi0": "policy=pi0 policy.checkpoint={place}/pi0",
    "smolvla": "experiment=metaworld_50_ppo_smolvla policy.checkpoint={place}/smolvla",
}
EVALUATED = [  # on another suite than the one trained on
    ("ppo eval.env=metaworld_faucet", ""),
    (
        "ppo env=metaworld/reach-v3",
        "",
    ),
    ("ppo eval.env.id=metaworld/ML45-tets", r"eval\.env\.id=metaworld/ML45-tets: unknown .*did you mean .*ML45-test"),
    ("ppo eval.env.id=metawrld/ML45-test", r"eval\.env\.id=metawrld/ML45-test: unknown .*did you mean metaworld"),
    ("ppo eval.env.image_sise=32", r"unknown setting 'eval\.env\.image_sise'; did you mean eval\.env\.image_size"),
    ("ppo eval.env.group_size=2", r"eval\.env\.group_size=2: evaluations have no groups"),
    (
        "ppo eval.env=calvin demonstrations.episodes=0",
        r"eval\.env\.id=calvin/D: is of calvin, and the policy learns to act in metaworld",
    ),
    ("ppo eval.env.id=metaworld/reach-v3", r"reset_ranges 'button-press.*; what eval\.env does not say is as in env"),
    ("ppo eval.env.id=libero/goal", r"eval\.env\.id=libero/goal: is of libero, .*type another suite of metaworld"),
    ("ppo {robotwin} eval.env.step_lim=20 policy.chunk_size=25", r"eval\.env\.id=robotwin/\w+: chunk_size=25: a chunk"),
    ("ppo {plate} eval.env=maniskill_push_cube", r"eval\.env\.id=maniskill/PushCube-v1: the policy has 7 action and 8"),
    (
        "ppo eval.env.id=metaworld/MT50 eval.env.reset_ranges=null eval.mean_of=[esy]",
        r"unknown group in eval\.mean_of 'esy'; did you mean easy",
    ),
    ("ppo pipeline.stages=2 eval.env.num_envs=1", "stages=2"),
    ("ppo eval.temperature=0.6", r"eval\.temperature=0\.6: is of sampled actions, .*type eval\.sampled=true"),
    ("ppo eval.sampled=true eval.temperature=0.6", "policy=small does not sample at a temperature; leave it out"),
    ("ppo eval.sampled=true eval.temperature=0", r"eval\.temperature=0: must be greater than 0"),
    ("evaluate policy.checkpoint={place}/small eval.env.id=metaworld/MT50", ""),
]
CALVIN = [  # {calvin} is a task alone
    ("ppo {calvin} env.id=calvin/E", "unknown CALVIN suite or task 'E'; known are lh-mtlc, A, B"),
    ("ppo {calvin} env.id=calvin/open_drawr", r"unknown CALVIN suite or task 'open_drawr'; did you mean open_drawer"),
    ("ppo {calvin} env.id=calvin/D+open_drawer", "joins scenes and tasks; type calvin/ABC for scenes, scene=A for"),
    ("ppo {calvin} env.id=calvin/A env.scene=D", "scene=D: calvin/A says by its name where it is; type calvin/D"),
    ("ppo {calvin} env.scene=E", "scene=E: is not of A, B, C, D, or some of them; type scene=D or scene=ABC"),
    (
        "ppo {calvin} env.path=/nope demonstrations.episodes=0",
        "no checkout of calvin_env. Looked in; /nope: no such folder; Type: python -m vla_envs fetch calvin",
    ),
    (
        "ppo {calvin} env.relative_reward=true demonstrations.episodes=0",
        "relative_reward=True: .* leave relative_reward out",
    ),
    (
        "ppo env=metaworld_button env.relative_reward=true",
        "relative_reward=True: metaworld/button-press-topdown-v3 pays once .* leave relative_reward out",
    ),
    ("ppo {calvin} env.chains=published", "chains=published is for training in scenes such as calvin/D"),
    ("ppo {calvin} env.id=calvin/D", "calvin/D has no scripted expert, .*type demonstrations.episodes=0"),
    ("sft {calvin} env.id=calvin/open_drawer+stack_block", r"calvin/open_drawer\+stack_block has no scripted expert"),
    ("ppo {lh-mtlc} env.max_episode_steps=1801", "has 360 steps for each of 5 tasks; type less than 1800 to cut"),
    ("ppo {lh-mtlc} eval.trials=1001", "has 1000 initial states per task, got trials=1001; take fewer"),
]
ROBOTWIN = [
    (
        "ppo {robotwin} env.id=robotwin/place_emty_cup",
        "unknown RoboTwin task 'place_emty_cup'; did you mean place_empty",
    ),
    (
        "ppo {robotwin} env.id=robotwin/place_fan",
        "place_fan cannot be run: its reset fails; robotwin/all are those that",
    ),
    ("ppo {robotwin} env.id=robotwin/open_laptop", "open_laptop cannot be run: its success check needs what only a"),
    ("ppo {robotwin} env.id=robotwin/click_bell+click_bell", "names a task twice; name each task once"),
    ("ppo {robotwin} env.embodiment=[piper]", r"is \[aloha-agilex\] .* type embodiment=\[piper,piper,0\.6\]"),
    ("ppo {robotwin} env.embodiment=[piper,piper,7]", r"the metres between them, at most 2.; type embodiment="),
    ("ppo {robotwin} env.task_config=clean", r"must be 'demo_clean' or 'demo_randomized'; did you mean demo_clean"),
    ("ppo {robotwin} env.shader=raytrace", r"env\.shader=raytrace: must be 'default' or 'rt'"),
    ("ppo {robotwin} env.max_episode_steps=100", r"'env\.max_episode_steps'; did you mean env\.step_lim"),
    ("ppo {calvin} env.step_lim=100", r"'env\.step_lim'; did you mean env\.max_episode_steps"),
    (
        "ppo {robotwin} env.step_lim=20 policy.chunk_size=25",
        "chunk_size=25: a chunk of .* its episodes end after 20 act",
    ),
    ("ppo {robotwin} eval.trials=261", "has 260 initial states per task, got trials=261; take fewer"),
    (
        "ppo {robotwin} env.path=/nope",
        "no checkout of RoboTwin. Looked in; /nope: no such folder; Type: python -m vla_envs fetch robotwin",
    ),
    (
        "ppo {robotwin} env.assets_path={place}",
        "incomplete, lacks assets/objects/same.json and .* more; Type: python -m vla_envs fetch",
    ),
    ("sft env=robotwin", "place_empty_cup has no scripted expert, .*type demonstrations.episodes=0"),
    ("ppo {robotwin} {pi0} policy.config_name=pi0_aloha_robotwin", "room for 8 numbers, robotwin needs more"),
]
LEROBOT = [  # folders of LeRobot, of SmolVLA unless they say otherwise
    ("ppo {smolvla}_act", "is of 'act', config.json must be of 'smolvla'; pass a checkpoint of smolvla"),
    ("ppo {smolvla}_diffusion", "is of 'diffusion', config.json must be of 'smolvla'"),
    ("evaluate {smolvla}_act", "is of 'act', config.json must be of 'smolvla'"),
    ("evaluate policy.checkpoint={place}/smolvla_act", "is a checkpoint of 'act'; known are .*smolvla"),
    ("ppo {smolvla}_statistics", "has no policy_preprocessor_step_.*, the statistics; copy it"),
    ("ppo {smolvla}_processors", "has a step 'pi0_new_line_processor', which is not of smolvla .* copy its own"),
    ("ppo {smolvla}_cut", "model.safetensors is truncated or no safetensors file.*copy it again"),
    ("ppo {smolvla} policy.cameras=[observation.images.top]", r"cameras=\[.* looks at observation\.image; set cameras"),
    ("ppo {smolvla} policy.num_action_chunks=11", r"num_action_chunks is 11, must be 1 to 10, the horizon"),
    ("ppo {smolvla} policy.checkpoint=hf:lerobot/smolvla_base", "hf download lerobot/smolvla_base --local-dir"),
    ("ppo {smolvla} policy=pi0_lerobot", r"is a checkpoint of smolvla, not of pi0_lerobot; type policy=smolvla"),
    ("ppo {smolvla} env=libero env.id=libero/goal", r"cameras=\[.* looks at observation\.image; set cameras"),
    ("ppo {smolvla} policy.new_statistics=2", r"new_statistics=2: must be a valid boolean"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of what is no checkpoint for one reason or another."""
    folder = tmp_path_factory.mktemp("wrong")
    SmallVLA(SmallVLAConfig((-1.0,) * 4, (1.0,) * 4, 4)).save_pretrained(folder / "small")
    for name in ("cut", "random", "broken", "run/policy"):
        shutil.copytree(folder / "small", folder / name)
    weights = (folder / "small" / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(weights[:1000])
    (folder / "random" / "model.safetensors").write_bytes(os.urandom(5000))
    (folder / "broken" / "config.json").write_text("{bad")
    (folder / "empty").mkdir()
    (folder / "unfinished" / "checkpoints").mkdir(parents=True)
    (folder / "evaluation").mkdir()
    for name in ("unfinished", "evaluation"):
        (folder / name / "run.json").write_text("{}")
    (folder / "rlinf").mkdir()
    (folder / "rlinf" / "full_weights.pt").write_bytes(b"")
    (folder / "file").write_text("text")
    make_checkpoint(folder / "openvla")
    make_pi0_checkpoint(folder / "pi0", horizon=50)
    make_wrong_smolvla(make_tiny("smolvla_metaworld", folder / "smolvla"))
    return folder


def make_wrong_smolvla(right):
    """Copy a folder to ``<name>_<what is wrong>``."""
    for what in ("act", "diffusion", "statistics", "processors", "cut"):
        wrong = shutil.copytree(right, right.with_name(f"{right.name}_{what}"))
        if what in ("act", "diffusion"):
            change_json(wrong / "config.json", type=what)
        elif what == "statistics":
            next(wrong.glob("policy_preprocessor_step_*")).unlink()
        elif what == "processors":
            file = wrong / "policy_preprocessor.json"
            file.write_text(file.read_text().replace("smolvla_new_line_processor", "pi0_new_line_processor"))
        else:
            (wrong / "model.safetensors").write_bytes((right / "model.safetensors").read_bytes()[:100_000])


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        *NAMES,
        *OTHER_ALGORITHM,
        *GRAMMAR,
        *FLAGS,
        *VALUES,
        *FILES,
        *ENVIRONMENT,
        *EVALUATED,
        *CALVIN,
        *ROBOTWIN,
        *LEROBOT,
    ],
    ids=lambda text: text if "=" in text or text[:1] in tuple("pegs") else "",
)
def test_a_wrong_input_is_one_line(typed, message, place, tmp_path):
    for name, stands_for in SHORT.items():
        typed = typed.replace(f"{{{name}}}", stands_for)
    words = typed.replace("{place}", str(place)).split()
    environment = {}
    while "=" in words[0]:
        environment |= dict([words.pop(0).split("=")])
    name, *settings = words
    if not any("hydra.run.dir" in word or word in ("-m", "--multirun") or "sweep" in word for word in settings):
        settings.append(f"hydra.run.dir={tmp_path / 'run'}")
    done = forked.run(name, *settings, cwd=tmp_path, **environment)
    assert done.stderr.startswith("error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 1100, done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert done.returncode == WRONG_USE
    assert not list(tmp_path.iterdir())


def test_a_traceback_is_shown_if_it_is_asked_for(tmp_path):
    done = forked.run("ppo", "optim.lr=abc", f"hydra.run.dir={tmp_path / 'run'}", VLA_TRACEBACK="1")
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1] == "error: optim.lr=abc: must be a valid number"
    assert done.returncode == WRONG_USE


def test_what_is_only_shown_has_no_error(tmp_path):
    done = forked.run("ppo", "--cfg", "job", "optim.lr=1e-4", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "lr: 0.0001" in done.stdout
    assert not list(tmp_path.iterdir())


def test_the_words_of_completion_are_no_settings(tmp_path):
    done = forked.run("ppo", "-sc", "install=bash", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "hydra_bash_completion" in done.stdout


@pytest.mark.parametrize(
    ("module", "typed", "message"),
    [
        (
            "vla_policies",
            ["inspect", "nope"],
            "no folder nope; pass a checkpoint folder, or a repository of the hub as hf:NAME",
        ),
        ("vla_policies", ["inspect"], "required: folder; type: python -m vla_policies inspect --help"),
        ("vla_policies", ["inspekt", "x"], "invalid choice: 'inspekt' .choose from 'inspect'"),
        (
            "vla_envs",
            ["--al", "x"],
            "invalid choice: 'x' .choose from 'fetch', 'check'.; type: python -m vla_envs --help",
        ),
        ("recipes", ["run", "ppoo"], "unknown recipe 'ppoo'; did you mean ppo"),
        ("recipes", ["rum", "ppo"], "invalid choice: 'rum'.*type: vla-recipe --help"),
        ("recipes", ["copy", "ppo", "--to", "/proc/nope"], "No such file or directory: /proc/nope"),
    ],
)
def test_commands_say_what_is_wrong_in_one_line(module, typed, message, tmp_path):
    done = forked.run(ROOT / module / "__main__.py", *typed, cwd=tmp_path)
    assert done.stderr.startswith("error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert done.returncode == WRONG_USE


def test_what_fails_after_work_began_keeps_its_traceback_unless_its_message_says_all(capsys):
    def said(error, *notes):
        try:
            raise error
        except BaseException as raised:
            for note in notes:
                raised.add_note(note)
            return report(raised), capsys.readouterr().err

    status, text = said(IndexError("list index out of range"), "in the run x")
    assert status == FAILED
    assert text.startswith("Traceback")
    assert text.endswith("in the run x\n")
    status, text = said(CheckpointError("broken:\n  torn\nresume with\n another"), "in the run x")
    assert (status, text) == (FAILED, "error: broken: torn; resume with; another\n")
    status, text = said(IndexError("list index out of range"))
    assert (status, text) == (WRONG_USE, "error: IndexError: list index out of range; VLA_TRACEBACK=1 shows where\n")
    status, text = said(OSError(28, "No space left on device", "/run/x"), "in the run x")
    assert (status, text) == (FAILED, "error: No space left on device: /run/x\n")
    status, text = said(KeyboardInterrupt())
    assert (status, text) == (INTERRUPTED, "error: interrupted; type the same command to start again\n")


def test_a_message_of_many_lines_is_one():
    assert one_line("a:\n  b\n  c,\n d") == "a: b; c, d"
    worker = "worker 0 failed: Traceback (most recent call last):\n  File x\n    y()\nRuntimeError: no display\n"
    assert one_line(worker) == "worker 0 failed: RuntimeError: no display"
    assert len(one_line("word " * 10_000)) < 1100


def test_other_processes_wait_for_the_first_to_say_it(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(program.time, "sleep", waited.append)
    program.report(ValueError("wrong"))
    assert not waited
    monkeypatch.setenv("RANK", "1")
    program.report(ValueError("wrong"))
    assert len(waited) == 1
    error = CheckpointError("broken")
    error.add_note("in the run x")
    program.report(error)
    assert len(waited) == 1, "once work has begun, only one process says it"


def test_outside_of_a_program_errors_are_raised(tmp_path):
    with pytest.raises(ValueError, match="must be a valid number"):
        recipe_here("ppo", tmp_path / "run", "optim.lr=abc")
