"""The commands of docs/checkpoints are run as written, in their order, on tiny checkpoints of the real layouts.

The rule: where ``hf download`` would have put a checkpoint, :data:`PAGES` puts a tiny one of the same layout. Behind
what a page types for a recipe come the settings of :data:`BENCHMARKS` and :data:`RECIPES`, which make episodes, batches
and the number of iterations small. Nothing else is changed. What needs a network is in :data:`NOT_RUN`; any other
program fails the test.
"""

import json
import re
import shlex
from dataclasses import dataclass

import pytest
from forked import ForkedPrograms
from huggingface_hub import ModelCard
from openvla_checkpoint import make_checkpoint as make_openvla
from paths import ROOT
from pi0_checkpoint import make_checkpoint as make_pi0
from safetensors.torch import load_file
from simulators import libero_assets

from vla_envs.maniskill import assets
from vla_envs.rendering import vulkan
from vla_policies import OpenVLAOFT
from vla_policies.checkpoint.lora import add_lora, save_adapter

DOCS = ROOT / "docs" / "checkpoints"
NOT_RUN = {
    "hf download": "needs the hub",
    "hf upload": "needs the hub, and an account",
    "hf auth": "needs an account",
    "curl": "needs a network",
}
PROGRAMS = {"vla-recipe": ROOT / "recipes" / "__main__.py"}
MODULES = {"vla_policies": ROOT / "vla_policies" / "__main__.py"}

EPISODES = ["env.num_envs=2", "env.num_workers=1", "eval.trials=1", "eval.videos=0"]
BENCHMARKS = {
    "libero": ["env.task_ids=[0]", "env.max_episode_steps=10", "env.image_size=64", "env.render_quality=fast"],
    "metaworld": ["env.id=metaworld/reach-v3", "eval.mean_of=[]", "env.max_episode_steps=10", "env.image_size=64"],
    "maniskill": [
        *("env.id=maniskill/PutOnPlateInScene25Main-v3", "eval.mean_of=[]"),
        *("env.max_episode_steps=6", "env.image_size=48"),
    ],
}
UPDATE = ["update.epochs=1", "update.micro_batch_size=2", "evaluate_every=0"]
RECIPES = {
    "evaluate": [],
    "ppo": [*UPDATE, "collector.decisions=2", "update.minibatch_size=4"],
    "grpo": [*UPDATE, "group_size=2", "collector.groups=2", "collector.max_groups=2", "update.minibatches=1"],
}
FIRST, FURTHER = "iterations=1", "iterations=2"  # the latter where a page types a number of iterations itself


@dataclass
class Page:
    """What stands for the checkpoints of a page.

    Attributes:
        checkpoints: what makes each folder that the page downloads.
        trained: folders with what training and merging wrote of the first of them.
        needs: skips the test where a simulator lacks.
    """

    checkpoints: dict
    trained: tuple
    needs: object


def openvla(folder, key="tiny", **parts):
    make_openvla(folder, **parts)
    file = folder / "dataset_statistics.json"
    (statistics,) = json.loads(file.read_text()).values()
    file.write_text(json.dumps({key: statistics}))


def adapter_of_openvla(folder):
    make_openvla(folder.parent / "base")
    policy = OpenVLAOFT.from_pretrained(
        folder.parent / "base", benchmark="maniskill", layout="rlinf", use_proprio=False
    )
    add_lora(policy, 32)
    save_adapter(policy, folder)


def plate25():
    try:
        vulkan.check_driver()
        assets.find_assets()
    except (vulkan.VulkanError, FileNotFoundError) as error:
        pytest.skip(str(error))


PAGES = {
    "openvla.md": Page(
        {
            "checkpoints/openvla-plate25": lambda folder: openvla(folder, "bridge_orig"),
            "checkpoints/openvla-libero": openvla,
        },
        ("runs/openvla/policy", "checkpoints/openvla-plate25-ppo"),
        lambda: (plate25(), libero_assets()),
    ),
    "openvla-oft.md": Page(
        {
            "checkpoints/oft-libero": openvla,
            "checkpoints/oft-official": lambda folder: openvla(folder, heads=True),
            "checkpoints/openvla-7b": lambda folder: openvla(folder, "bridge_orig"),
            "checkpoints/oft-plate25-adapter": adapter_of_openvla,
        },
        ("runs/oft/policy", "checkpoints/oft-libero-grpo"),
        lambda: (plate25(), libero_assets()),
    ),
    "pi0.md": Page(
        {"checkpoints/pi0-metaworld": lambda folder: make_pi0(folder, "pi0_tiny")},
        ("runs/pi0/policy", "checkpoints/pi0-merged"),
        lambda: pytest.importorskip("metaworld"),
    ),
    "pi05.md": Page(
        {"checkpoints/pi05-libero": lambda folder: make_pi0(folder, "pi05_tiny")},
        ("runs/pi05/policy", "checkpoints/pi05-merged"),
        libero_assets,
    ),
}


def blocks(page):
    """The code of a page that is meant to be typed: language and text of each block."""
    return re.findall(r"^```(bash|python)\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def commands(text):
    """Each command of a block of bash, as words."""
    return [words for line in text.replace("\\\n", " ").splitlines() if (words := shlex.split(line, comments=True))]


def excepted(words):
    return next((name for name in NOT_RUN if words[: len(name.split())] == name.split()), None)


def made_small(recipe, words):
    """What is typed for a recipe, and the settings that make it small."""
    (benchmark,) = (each for each in BENCHMARKS if any(re.match(f"(experiment|env)={each}", word) for word in words))
    settings = [*EPISODES, *BENCHMARKS[benchmark], *RECIPES[recipe]]
    if recipe != "evaluate":
        settings.append(FURTHER if any(word.startswith("iterations=") for word in words) else FIRST)
    return [*words, *settings]


@pytest.fixture(scope="module")
def programs():
    programs = ForkedPrograms()
    yield programs
    programs.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page(name, programs, tmp_path, monkeypatch):
    page = PAGES[name]
    page.needs()
    monkeypatch.chdir(tmp_path)
    downloaded, ran = set(), []
    for language, text in blocks(name):
        if language == "python":
            exec(compile(text, name, "exec"), {})
            continue
        for words in commands(text):
            if words[:2] == ["hf", "download"]:
                folder = words[words.index("--local-dir") + 1]
                page.checkpoints[folder](tmp_path / folder)
                downloaded.add(folder)
            if excepted(words):
                continue
            done = run(words, programs)
            assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            ran.append((words, done.stdout))
    assert downloaded == page.checkpoints.keys()
    check_resumed(ran)
    check_folders(page, ran, tmp_path)
    check_card(ran, tmp_path)


def run(words, programs):
    """Run what a page types; a program that is not known is a failure."""
    if words[0] in PROGRAMS:
        return programs.run(PROGRAMS[words[0]], *words[1:], limit=600)
    if words[:2] == ["python", "-m"] and words[2] in MODULES:
        return programs.run(MODULES[words[2]], *words[3:], limit=600)
    recipe = re.fullmatch(r"recipes/(\w+)\.py", words[1]) if words[0] == "python" and len(words) > 1 else None
    assert recipe, f"the test does not know {words[0]}: {shlex.join(words)}"
    return programs.run(recipe[1], *made_small(recipe[1], words[2:]), limit=600)


def check_resumed(ran):
    """The second time a command goes on; the third has one iteration more."""
    said = [out for words, out in ran if words[1] in ("recipes/ppo.py", "recipes/grpo.py")][:3]
    assert ["resumed after 1 iterations" in out for out in said] == [False, True, True]


def check_folders(page, ran, place):
    """What was trained and what was merged have the tensors of the checkpoint, by its names, and its small files."""
    start = next(iter(page.checkpoints))
    before = load_file(place / start / "model.safetensors")
    for folder in page.trained:
        after = load_file(place / folder / "model.safetensors")
        own = {name for name in after if name.startswith("value_head.")}
        assert after.keys() - own == before.keys()
        assert all(after[name].shape == tensor.shape for name, tensor in before.items())
        files = {file.name for file in (place / start).iterdir() if file.is_file()}
        assert files <= {file.name for file in (place / folder).iterdir()}
        assert (place / folder / "environment.json").is_file()
    merged = next(words[words.index("--to") + 1] for words, _ in ran if words[:2] == ["vla-recipe", "merge"])
    assert not (place / merged / "lora_adapter").exists()


def check_card(ran, place):
    """The hub's own reader takes the card, and it has the success that the evaluation has found."""
    (words,) = (words for words, _ in ran if words[:2] == ["vla-recipe", "card"])
    folder, evaluation = words[2:4]
    card = ModelCard.load(place / folder / "README.md")
    metrics = json.loads((place / evaluation / "metrics.json").read_text())
    (result,) = card.data.eval_results
    assert result.metric_value == round(100 * metrics["eval/success_once"], 1)
    assert card.data.base_model == words[words.index("--base-model") + 1]
    for text in metrics["protocol_deviations"]:
        assert f"- not the benchmark's: {text}" in card.text


def test_a_command_that_is_not_known_fails():
    for typed in (
        "wget https://example.org",
        "python -m vla_other inspect",
        "python other.py",
        "torchrun recipes/ppo.py",
    ):
        (words,) = commands(typed)
        assert not excepted(words)
        with pytest.raises(AssertionError, match="does not know"):
            run(words, programs=None)


def test_every_page_is_known():
    assert {path.name for path in DOCS.glob("*.md")} == {*PAGES, "index.md"}
    assert not blocks("index.md"), "what it shows is run by nobody: write it as text"


def test_hub_ids_are_those_of_the_tables():
    """A page downloads, and names as base, what its table of weights lists; experiments name no other ones."""
    listed = {found for page in PAGES for found in hub_ids(page)}
    for page in PAGES:
        for words in [words for language, text in blocks(page) if language == "bash" for words in commands(text)]:
            typed = {words[2]} if words[:2] == ["hf", "download"] else set()
            typed |= {words[words.index("--base-model") + 1]} if "--base-model" in words else set()
            assert typed <= hub_ids(page), page
    for path in (ROOT / "recipes" / "conf" / "experiment").glob("*.yaml"):
        for found in re.findall(
            r"(?:RLinf|gen-robot|openvla|moojink)/[\w-]+[\w.-]*\w", path.read_text().split("recipe:")[0]
        ):
            assert found in listed, f"{path.stem} names {found}, which no page lists"


def hub_ids(page):
    text = (DOCS / page).read_text().split("## Where the weights are")[1].split("\n## ")[0]
    found = set(re.findall(r"`([\w.-]+/[\w.-]+)`", text))
    for stem in [each for each in found if each.endswith("beat_block_hammer")]:
        kind = stem.removesuffix("beat_block_hammer")
        others = ("pick_dual_bottles", "place_empty_cup", "place_container_plate", "move_can_pot", "lift_pot")
        found |= {kind + task for task in (*others, "handover_block")}
    return found
