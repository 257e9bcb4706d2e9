"""Tiny checkpoints: the published layout, the same each time, made of nothing but the library."""

import json
import re

import pytest
import torch
from paths import GOLDEN
from running import composed

from vla_envs.registry import make_spec
from vla_policies import OpenVLA, OpenVLAOFT, Pi0, SmolVLA, load_policy, make_example
from vla_policies.checkpoint.weights import list_weights
from vla_policies.cli import main
from vla_policies.pi0.checkpoint import EMBEDDINGS
from vla_policies.tiny import KINDS, make_tiny

LAYOUTS = {
    "openvla": "openvla_7b",
    "openvla_oft_official": "openvla_7b",
    "openvla_oft_rlinf": "openvla_7b",
    "openvla_oft_calvin": "openvla_7b",
    "openvla_oft_robotwin": "openvla_7b",
    "pi0": "pi0",
    "pi05": "pi05",
    "smolvla": "smolvla",
    "smolvla_metaworld": "smolvla",
    "smolvla_small": "smolvla",
}
LOADED = {
    "openvla": (OpenVLA, "libero", {}),
    "openvla_oft_official": (OpenVLAOFT, "libero", {"num_images_in_input": 2}),
    "openvla_oft_rlinf": (OpenVLAOFT, "libero", {"layout": "rlinf"}),
    "openvla_oft_calvin": (OpenVLAOFT, "calvin", {"layout": "rlinf"}),
    "openvla_oft_robotwin": (OpenVLAOFT, "robotwin", {"num_images_in_input": 1}),
    "pi0": (Pi0, "libero", {"config_name": "pi0_libero"}),
    "pi05": (Pi0, "libero", {"config_name": "pi05_libero"}),
    "smolvla": (SmolVLA, "libero", {}),
    "smolvla_metaworld": (SmolVLA, "metaworld", {}),
    "smolvla_small": (SmolVLA, "metaworld", {}),
}
HEADS = {
    "openvla_oft_official": {"action_head--150000_checkpoint.pt", "proprio_projector--150000_checkpoint.pt"},
    "openvla_oft_robotwin": {"proprio_projector--150000_checkpoint.pt"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("tiny")
    return {kind: make_tiny(kind, place / kind) for kind in KINDS}


def without_numbers(names):
    return {re.sub(r"\.\d+\.", ".N.", name) for name in names}


@pytest.mark.parametrize("kind", KINDS)
def test_the_names_and_dimensions_are_the_published_ones(kind, made):
    published = json.loads((GOLDEN / f"{LAYOUTS[kind]}_full_layout.json").read_text())
    published.pop(EMBEDDINGS, None)  # stored once, as lm_head
    found = list_weights(made[kind])
    assert without_numbers(found) == without_numbers(published)
    assert all(len(entry.shape) == len(published[name]) for name, entry in found.items())
    assert {file.name for file in made[kind].glob("*--*")} == HEADS.get(kind, set())


@pytest.mark.parametrize("kind", KINDS)
def test_it_acts_and_lacks_nothing(kind, made, capsys):
    assert main(["inspect", str(made[kind])]) == 0
    policy_class, benchmark, settings = LOADED[kind]
    policy = load_policy(made[kind], family=policy_class.family, benchmark=benchmark, **settings)
    assert type(policy) is policy_class
    action = policy(make_example(benchmark))["action"]
    assert action.shape == (1, policy.chunk_size, {"robotwin": 14, "metaworld": 4}.get(benchmark, 7))
    assert torch.isfinite(action).all()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_same_each_time_and_draws_nothing_of_the_caller(kind, made, tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    again = make_tiny(kind, tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), state)
    files = [file for file in sorted(again.rglob("*")) if file.is_file()]
    assert files
    for file in files:
        assert file.read_bytes() == (made[kind] / file.relative_to(again)).read_bytes(), file.name


@pytest.mark.parametrize(
    ("env_id", "benchmark"),
    [
        *((f"libero/{suite}", "libero") for suite in ("spatial", "object", "goal", "10")),
        ("metaworld/MT50", "metaworld"),
        ("maniskill/plate25-ood", "maniskill"),
        ("calvin/D", "calvin"),
    ],
)
def test_it_fits_the_benchmarks_and_their_instructions(env_id, benchmark, made):
    """What a run checks before it starts; the longest prompt of pi0 is of 48 tokens."""
    spec = make_spec(env_id)
    for policy in (
        OpenVLA.from_pretrained(made["openvla"], benchmark=benchmark),
        Pi0.from_pretrained(made["pi0"], benchmark=benchmark, config_name=f"pi0_{benchmark}"),
    ):
        policy.check_environment(spec)
    if benchmark in ("libero", "metaworld"):
        kind = "smolvla" if benchmark == "libero" else "smolvla_metaworld"
        SmolVLA.from_pretrained(made[kind], benchmark=benchmark).check_environment(spec)


@pytest.mark.parametrize(
    ("kind", "experiment", "key"),
    [
        ("openvla_oft_calvin", "calvin_abc_d_grpo_openvlaoft", "calvin_abc"),
        ("openvla_oft_robotwin", "robotwin_lift_pot_grpo_openvlaoft", "lift_pot_1k"),
    ],
)
def test_it_fits_an_experiment_with_the_statistics_that_are_asked_for(kind, experiment, key, tmp_path):
    folder = make_tiny(kind, tmp_path / "tiny", key)
    config = composed("grpo", [f"experiment={experiment}", f"policy.checkpoint={folder}"], tmp_path / "run")
    settings = {name: value for name, value in config.policy.items() if value is not None and name != "family"}
    spec = make_spec(config.env.id)
    OpenVLAOFT.make(spec, **settings).check_environment(spec)


def test_the_command(tmp_path, capsys):
    folder = tmp_path / "tiny"
    assert main(["tiny", "pi0", "--to", str(folder), "--statistics", "mine"]) == 0
    assert "it solves nothing" in capsys.readouterr().out
    assert "solves nothing" in (folder / "README.md").read_text()
    assert (folder / "assets" / "mine" / "norm_stats.json").is_file()
    assert main(["tiny", "pi0", "--to", str(folder)]) == 2
    assert capsys.readouterr().err == f"error: {folder} is there already; type another folder: --to NEW\n"
    assert main(["tiny", "pi1", "--to", str(tmp_path / "other")]) == 2
    assert "one of openvla, openvla_oft_official, openvla_oft_rlinf, openvla_oft_calvin, " in capsys.readouterr().err
    assert main(["tiny", "pi0", "policy.seed=1", "--to", str(tmp_path / "other")]) == 2
    assert "tiny takes a folder and no settings" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
