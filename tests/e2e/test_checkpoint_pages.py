"""The commands of docs/checkpoints are run as written, in their order, on tiny checkpoints of the real layouts.

The rule is that of the first page, under "Try it without weights": where ``hf download`` would have put a checkpoint,
``python -m vla_policies tiny`` puts one of the same layout, of the kinds in :data:`PAGES`, and behind what a page types
for a recipe come the settings of that page's table. The first page's own commands have them already. Nothing else is
changed. What needs a network is in :data:`NOT_RUN`; any other program fails the test.
"""

import json
import re
import shlex
from dataclasses import dataclass

import forked
import numpy as np
import pytest
from huggingface_hub import ModelCard
from lerobot_writer import write_lerobot
from paligemma_tokenizer import as_tokenizer_json
from paths import CONF, ROOT
from safetensors.torch import load_file
from simulators import SLOW, libero_assets

from vla_algos.run.arguments import check_names
from vla_envs.maniskill import assets
from vla_envs.registry import make_spec
from vla_envs.rendering import vulkan
from vla_policies import OpenVLAOFT
from vla_policies.checkpoint.lora import add_lora, save_adapter
from vla_policies.smolvla import tiny as smolvla
from vla_policies.tiny import KINDS, make_tiny

DOCS = ROOT / "docs" / "checkpoints"
NOT_RUN = {
    "hf download": "needs the hub",
    "hf upload": "needs the hub, and an account",
    "hf auth": "needs an account",
    "curl": "needs a network",
}
PROGRAMS = {"vla-recipe": ROOT / "recipes" / "__main__.py"}
MODULES = {"vla_policies": ROOT / "vla_policies" / "__main__.py"}

INDEX = (DOCS / "index.md").read_text()


def small(row):
    """The settings of a row of the first page's table."""
    (settings,) = re.findall(rf"^\| {re.escape(row)} \| `(.+)` \|$", INDEX, re.MULTILINE)
    return shlex.split(settings)


BENCHMARKS = {"libero": small("LIBERO"), "metaworld": small("Meta-World"), "maniskill": small("plate-25")}
UPDATE = small("`ppo.py`, `grpo.py`")
RECIPES = {
    "evaluate": [],
    "sft": small("`sft.py`"),
    "ppo": [*UPDATE, *small("`ppo.py`")],
    "grpo": [*UPDATE, *small("`grpo.py`")],
}
FIRST, FURTHER = "iterations=1", "iterations=2"  # the latter where a page types a number of iterations itself


@dataclass
class Page:
    """What stands for the checkpoints of a page.

    Attributes:
        checkpoints: what each folder is made with that the page downloads: words behind ``vla_policies tiny``, or a
            function.
        trained: folders with what training and merging wrote of the first of them.
        needs: skips the test where a simulator lacks.
    """

    checkpoints: dict
    trained: tuple
    needs: object


def adapter_of_openvla(folder):
    base = make_tiny("openvla", folder.parent / "base", "bridge_orig")
    policy = OpenVLAOFT.from_pretrained(base, benchmark="maniskill", layout="rlinf", use_proprio=False)
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
            "checkpoints/openvla-plate25": "openvla --statistics bridge_orig",
            "checkpoints/openvla-libero": "openvla",
        },
        ("runs/openvla/policy", "checkpoints/openvla-plate25-ppo"),
        lambda: (plate25(), libero_assets()),
    ),
    "openvla-oft.md": Page(
        {
            "checkpoints/oft-libero": "openvla_oft_rlinf",
            "checkpoints/oft-official": "openvla_oft_official",
            "checkpoints/openvla-7b": "openvla --statistics bridge_orig",
            "checkpoints/oft-plate25-adapter": adapter_of_openvla,
        },
        ("runs/oft/policy", "checkpoints/oft-libero-grpo"),
        lambda: (plate25(), libero_assets()),
    ),
    "pi0.md": Page(
        {
            "checkpoints/pi0-metaworld": "pi0",
            "checkpoints/paligemma": lambda folder: as_tokenizer_json(
                folder.parent / "pi0-metaworld" / "paligemma_tokenizer.model", folder
            ),
        },
        ("runs/pi0/policy", "checkpoints/pi0-merged"),
        lambda: pytest.importorskip("metaworld"),
    ),
    "pi05.md": Page(
        {"checkpoints/pi05-libero": "pi05"},
        ("runs/pi05/policy", "checkpoints/pi05-merged"),
        libero_assets,
    ),
    "smolvla.md": Page(
        {"checkpoints/smolvla-libero": "smolvla"},
        ("runs/smolvla/policy", "checkpoints/smolvla-merged"),
        libero_assets,
    ),
}


def smolvla_base(folder):
    """As the published one: cameras, state and actions of another robot."""
    folder.mkdir(parents=True)
    cameras = [f"observation.images.camera{number}" for number in (1, 2, 3)]
    words = make_spec("metaworld/reach-v3").tasks[0].instruction.split()
    smolvla.write_tiny(folder, "tiny", words, cameras=cameras, state_dim=6, action_dim=6)


def data_of_metaworld(folder):
    """A data set of LeRobot with a task that the commands are tried on, in the size of their images."""
    random, task = np.random.default_rng(0), make_spec("metaworld/reach-v3").tasks[0].instruction
    episode = {"task": task, "images": {"observation.image": np.zeros((9, 64, 64, 3), np.uint8)}}
    episode |= {name: random.uniform(-1, 1, (9, 4)).astype(np.float32) for name in ("states", "actions")}
    write_lerobot(folder, [episode, episode])


LEROBOT_PAGE = "../how-to/lerobot-checkpoint.md"
LEROBOT = Page(
    {"checkpoints/smolvla-base": smolvla_base, "data/metaworld": data_of_metaworld},
    (),
    lambda: [pytest.importorskip(name) for name in ("metaworld", "pyarrow", "av")],
)


def blocks(page):
    """The code of a page that is meant to be typed: language and text of each block."""
    return re.findall(r"^```(bash|python)\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def commands(text):
    """Each command of a block of bash, as words."""
    return [words for line in text.replace("\\\n", " ").splitlines() if (words := shlex.split(line, comments=True))]


def typed(page):
    """The commands of all blocks of bash of a page."""
    return [words for language, text in blocks(page) if language == "bash" for words in commands(text)]


def excepted(words):
    return next((name for name in NOT_RUN if words[: len(name.split())] == name.split()), None)


def made_small(recipe, words):
    """What is typed for a recipe, and the settings that make it small."""
    (benchmark,) = (each for each in BENCHMARKS if any(re.match(f"(experiment|env)={each}", word) for word in words))
    settings = [*small("every recipe"), *BENCHMARKS[benchmark], *RECIPES[recipe]]
    if recipe in ("ppo", "grpo"):
        settings.append(FURTHER if any(word.startswith("iterations=") for word in words) else FIRST)
    return [*words, *settings]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PAGES if SLOW else ("pi0.md", "smolvla.md"))
def test_the_commands_of_a_page(name, tmp_path, monkeypatch):
    page = PAGES[name]
    page.needs()
    monkeypatch.chdir(tmp_path)
    ran = run_page(name, page, tmp_path)
    check_resumed(ran)
    check_folders(page, ran, tmp_path)
    check_card(ran, tmp_path)


@pytest.mark.timeout(1800)
def test_the_commands_from_lerobots_base_to_a_folder_of_lerobot(tmp_path, monkeypatch):
    LEROBOT.needs()
    monkeypatch.chdir(tmp_path)
    ran = run_page(LEROBOT_PAGE, LEROBOT, tmp_path)
    check_card(ran, tmp_path)
    before, after = tmp_path / "checkpoints/smolvla-base", tmp_path / "runs/smolvla/policy"
    assert load_file(before / "model.safetensors").keys() == load_file(after / "model.safetensors").keys()
    files = {str(file.relative_to(before)) for file in before.rglob("*") if file.is_file()}
    assert files <= {str(file.relative_to(after)) for file in after.rglob("*")}
    first, last = (json.loads((folder / "config.json").read_text()) for folder in (before, after))
    last["input_features"]["observation.state"]["shape"] = last["output_features"]["action"]["shape"] = [6]
    changed = {"n_action_steps": 5, "num_steps": 5}
    assert last == {**first, **changed}
    statistics = load_file(after / "policy_postprocessor_step_0_unnormalizer_processor.safetensors")
    assert statistics["action.mean"].shape == (4,)


def run_page(name, page, tmp_path):
    """Run the commands of a page: each, as words, with what it printed."""
    downloaded, ran = set(), []
    for language, text in blocks(name):
        if language == "python":
            exec(compile(text, name, "exec"), {})
            continue
        for words in commands(text):
            if words[:2] == ["hf", "download"]:
                folder = words[words.index("--local-dir") + 1]
                make(page.checkpoints[folder], tmp_path / folder)
                downloaded.add(folder)
            if excepted(words):
                continue
            done = run(words, made_small)
            assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            ran.append((words, done.stdout))
    assert downloaded == page.checkpoints.keys()
    return ran


def make(how, folder):
    """Put a tiny checkpoint where the page downloads one."""
    if callable(how):
        return how(folder)
    done = run(["python", "-m", "vla_policies", "tiny", *how.split(), "--to", str(folder)])
    assert done.returncode == 0, done.stderr
    assert "solves nothing" in done.stdout
    return None


def run(words, completed=lambda recipe, words: words):
    """Run what a page types, a recipe with what ``completed`` makes of it; a program that is not known is a failure."""
    if words[0] in PROGRAMS:
        return forked.run(PROGRAMS[words[0]], *words[1:], limit=600)
    if words[:2] == ["python", "-m"] and words[2] in MODULES:
        return forked.run(MODULES[words[2]], *words[3:], limit=600)
    recipe = recipe_of(words)
    assert recipe, f"the test does not know {words[0]}: {shlex.join(words)}"
    return forked.run(recipe, *completed(recipe, words[2:]), limit=600)


def recipe_of(words):
    """The recipe that a command starts; ``None`` if it is another program."""
    found = re.fullmatch(r"recipes/(\w+)\.py", words[1]) if words[0] == "python" and len(words) > 1 else None
    return found and found[1]


def check_resumed(ran):
    """A command typed again says that its run has finished; with one iteration more it resumes."""
    said = [out for words, out in ran if words[1] in ("recipes/ppo.py", "recipes/grpo.py")][:3]
    assert ["To train it further" in out for out in said] == [False, True, False]
    assert "resumed after 1 iterations" in said[2]


def check_folders(page, ran, place):
    """What was trained and what was merged have the tensors of the checkpoint, by its names, and its small files."""
    start = next(iter(page.checkpoints))
    before = load_file(place / start / "model.safetensors")
    for folder in page.trained:
        after = load_file(place / folder / "model.safetensors")
        own = {name for name in after if name.startswith("value_head.")}
        assert after.keys() - own == before.keys()
        assert all(after[name].shape == tensor.shape for name, tensor in before.items())
        files = {file.name for file in (place / start).iterdir() if file.is_file()} - {"README.md"}
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


@pytest.mark.timeout(900)
def test_the_commands_of_the_first_page(tmp_path, monkeypatch):
    pytest.importorskip("metaworld")
    monkeypatch.chdir(tmp_path)
    ran = []
    for _, text in blocks("index.md"):
        for words in commands(text):
            done = run(words)
            assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            ran.append((words, done.stdout))
    made = {words[4] for words, _ in ran if words[:4] == ["python", "-m", "vla_policies", "tiny"]}
    assert made == KINDS.keys()
    assert all("solves nothing" in out for words, out in ran if words[3] == "tiny")
    check_card(ran, tmp_path)


def test_the_first_page_types_the_settings_of_its_table():
    for words in typed("index.md"):
        if words[1] in ("recipes/evaluate.py", "recipes/ppo.py"):
            recipe = words[1].removeprefix("recipes/").removesuffix(".py")
            assert {*small("every recipe"), *BENCHMARKS["metaworld"], *RECIPES[recipe]} <= {*words}


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
            run(words)


def test_recipes_have_the_settings_that_pages_type():
    """Of all pages: whose commands run takes ``VLA_TORCHRL_SLOW=1``."""
    for page in (*PAGES, LEROBOT_PAGE):
        started = [(recipe, words) for words in typed(page) if (recipe := recipe_of(words))]
        assert started
        for recipe, words in started:
            check_names(recipe, words[2:], CONF)


def test_every_page_is_known():
    assert {path.name for path in DOCS.glob("*.md")} == {*PAGES, "index.md"}


def test_hub_ids_are_those_of_the_tables():
    """A page downloads, and names as base, what its table of weights lists; experiments name no other ones."""
    listed = {found for page in PAGES for found in hub_ids(page)}
    for page in PAGES:
        for words in typed(page):
            named = {words[2]} if words[:2] == ["hf", "download"] else set()
            named |= {words[words.index("--base-model") + 1]} if "--base-model" in words else set()
            assert named <= hub_ids(page), page
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
