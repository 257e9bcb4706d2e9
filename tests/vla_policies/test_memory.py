"""What a policy takes on a GPU: the calculation, and the sizes that it starts from."""

import json
import re
from math import prod

import pytest
import torch
from hardware import cards, row
from lerobot_checkpoint import make_checkpoint as make_smolvla
from openvla_checkpoint import make_checkpoint as make_openvla
from paths import CONF, GOLDEN, ROOT
from pi0_checkpoint import make_checkpoint as make_pi0

from vla_common.experiments import find_experiments
from vla_policies import make_example
from vla_policies.checkpoint.lora import adapt
from vla_policies.cli import main, read_settings
from vla_policies.memory import MemoryPlan, ParamGroup, calculate, group_parameters
from vla_policies.nn.blocks import blocks_of
from vla_policies.openvla import OpenVLA, OpenVLAOFT
from vla_policies.pi0 import Pi0
from vla_policies.pi0.checkpoint import LM_HEAD
from vla_policies.registry import load_policy, meta_policy
from vla_policies.small import SmallVLA, SmallVLAConfig
from vla_policies.smolvla import SmolVLA

BASE, ADAPTERS = 7.54e9, 110e6
BLOCK, REST, IN_VISION = 202_383_360, 335_900_000, 49  # of OpenVLA: Llama's layer, what is in no block, other blocks
LARGE = sorted(
    name for name, each in find_experiments(CONF).items() if not each.suite and "_small" not in name
)  # a row of a table needs what its file needs


def openvla(full):
    """OpenVLA's 7.54 billion parameters in groups: trained in float32, or frozen in bfloat16 with adapters."""
    size, adapters = (4, 0) if full else (2, ADAPTERS / 32)

    def group(count):
        own = adapters if count == BLOCK else 0  # in float32
        sizes = size * count + 4 * own, 2 * count + 4 * own
        return ParamGroup(*sizes, trained=full * count + own, gradients=2 * full * count + 4 * own)

    rest, vision = group(REST), group((BASE - REST - 32 * BLOCK) / IN_VISION)
    return [rest, *(group(BLOCK) for _ in range(32)), *(vision for _ in range(IN_VISION))]


@pytest.mark.parametrize(
    ("full", "plan", "update", "rollout", "host"),
    [
        (False, MemoryPlan(), 16.8, 16.8, 0),
        (False, MemoryPlan(shards=8), 3.6, 17.6, 0),
        (True, MemoryPlan(), 120.7, 120.7, 0),
        (True, MemoryPlan(shards=8, compute=True), 18.0, 26.4, 0),
        (True, MemoryPlan(shards=8, compute=True, optimizer_offload=True), 18.0, 18.9, 7.5),
        (True, MemoryPlan(shards=2, compute=True), 63.2, 60.3, 0),
        (True, MemoryPlan(compute=True, cpu_offload=True), 2.9, 15.1, 120.7),
        (True, MemoryPlan(compute=True, acting=True), 0, 15.1, 0),
    ],
    ids=str,
)
def test_the_table_that_sharding_was_designed_with(full, plan, update, rollout, host):
    """Independent of the code: worked out before it, from 7.54 billion parameters, to a tenth of a GB."""
    found = calculate(openvla(full), plan)
    assert found.update / 1e9 == pytest.approx(update, abs=0.1)
    assert found.rollout / 1e9 == pytest.approx(rollout, abs=0.1)
    assert found.host / 1e9 == pytest.approx(host, abs=0.1)


def test_what_torch_allocates_is_what_is_counted(tmp_path):
    """A tiny policy, its gradients and Adam, for real: every byte of their storages."""
    folder = make_openvla(tmp_path, heads=True)
    for rank, dtype in ((None, "float32"), (4, "bfloat16")):
        settings = {"dtype": dtype, **({"lora_rank": rank} if rank else {})}
        policy = OpenVLAOFT.from_pretrained(
            folder, benchmark="libero", dtype=getattr(torch, dtype), unnorm_key="golden_ds"
        )
        adapt(policy, rank)
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        sum(parameter.float().sum() for parameter in trained).backward()
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        steps = [value for value in states if value.ndim == 0]
        found = calculate(groups(meta_policy(folder, **settings)), MemoryPlan())
        assert found.weights == allocated(policy.parameters())
        assert found.gradients == allocated(parameter.grad for parameter in trained)
        assert found.adam == allocated(value for value in states if value.ndim)
        assert allocated(steps) == 4 * len(trained), "what is left out: a number per tensor, on the CPU"
        assert found.update == found.rollout == found.weights + found.gradients + found.adam


def groups(policy):
    return group_parameters(policy, policy.stays_float32)


def allocated(tensors):
    return sum(
        storage.nbytes() for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values()
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("folders")
    make_openvla(place / "openvla")
    make_openvla(place / "oft", heads=True)
    make_openvla(place / "value", value_head=True)
    for name in ("pi0", "pi05"):
        make_pi0(place / name, f"{name}_tiny")
    make_smolvla(place / "smolvla")
    return place


LIBERO = {"benchmark": "libero", "unnorm_key": "golden_ds"}
TOKENS = {"head": "tokens", "layout": "official"}
CASES = [
    (OpenVLA, "openvla", LIBERO, {}),
    (OpenVLA, "value", LIBERO, {"value_head": False, "lora_rank": 4, "dtype": "bfloat16"}),
    (OpenVLA, "value", LIBERO, {"lora_rank": 2, "lora_targets": ["q_proj", "fc1"]}),
    (OpenVLAOFT, "oft", LIBERO, {}),
    (OpenVLAOFT, "oft", LIBERO, {**TOKENS, "value_per_action": True, "use_proprio": False}),
    (OpenVLAOFT, "oft", LIBERO, {**TOKENS, "lora_rank": 4, "dtype": "bfloat16", "value_head": False}),
    (Pi0, "pi0", {"benchmark": "libero"}, {"config_name": "pi0_libero"}),
    (Pi0, "pi0", {"benchmark": "libero"}, {"config_name": "pi0_libero", "lora_rank": 4, "dtype": "bfloat16"}),
    (Pi0, "pi05", {"benchmark": "libero"}, {"config_name": "pi05_libero", "value_after_vlm": "mean"}),
    (Pi0, "pi05", {"benchmark": "libero"}, {"config_name": "pi05_libero", "method": "flow_noise", "value_head": False}),
    (Pi0, "pi05", {"benchmark": "libero"}, {"config_name": "pi05_libero", "train_expert_only": False}),
    (SmolVLA, "smolvla", {"benchmark": "libero"}, {}),
    (SmolVLA, "smolvla", {"benchmark": "libero"}, {"method": "flow_noise", "lora_rank": 4, "dtype": "bfloat16"}),
    (SmolVLA, "smolvla", {"benchmark": "libero"}, {"train_expert_only": False, "value_after_vlm": "mean"}),
]


def parameters(module):
    return {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()}


def load(policy_class, folder, given, settings):
    settings = dict(settings)
    lora = [settings.pop(f"lora_{name}", None) for name in ("rank", "alpha", "targets")]
    dtype = getattr(torch, settings.pop("dtype", "float32"))
    policy = policy_class.from_pretrained(folder, dtype=dtype, **given, **settings)
    adapt(policy, *lora)
    return policy


@pytest.mark.parametrize(("policy_class", "name", "given", "settings"), CASES)
def test_a_meta_policy_has_the_parameters_of_the_policy(folders, policy_class, name, given, settings):
    """Names, shapes, precision and what is trained: as the policy that is loaded for real."""
    policy = load(policy_class, folders / name, given, settings)
    meta = meta_policy(folders / name, family=policy_class.family, **settings)
    assert parameters(meta) == parameters(policy)
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert sum(group.weights for group in groups(meta)) == allocated(policy.parameters())


def test_what_was_saved_says_its_adapter_and_settings_itself(folders, tmp_path):
    policy = load(OpenVLAOFT, folders / "oft", LIBERO, {**TOKENS, "lora_rank": 4, "use_proprio": False})
    policy.save_pretrained(tmp_path)
    assert parameters(meta_policy(tmp_path)) == parameters(load_policy(tmp_path))


def test_a_small_policy_is_read_from_its_configuration(tmp_path):
    policy = SmallVLA(SmallVLAConfig(action_low=(-1.0,) * 4, action_high=(1.0,) * 4, state_dim=4))
    policy.save_pretrained(tmp_path)
    assert parameters(meta_policy(tmp_path)) == parameters(policy)


@pytest.mark.parametrize(
    ("name", "settings", "file"),
    [
        ("openvla", {"value_head": False}, "openvla_7b"),
        ("pi0", {"config_name": "pi0_libero", "value_head": False}, "pi0"),
        ("pi0", {"config_name": "pi05_libero", "value_head": False}, "pi05"),
        ("smolvla", {"value_head": False}, "smolvla"),
    ],
)
def test_published_sizes_are_those_of_the_published_files(name, settings, file):
    """The headers of the real checkpoints, but for tensors that nothing reads."""
    layout = json.loads((GOLDEN / f"{file}_full_layout.json").read_text())
    policy = meta_policy(name, **settings)
    found = {key.removeprefix("model."): shape for key, (shape, *_) in parameters(policy).items()}
    layout = {key.removeprefix("model.") if name == "smolvla" else key: shape for key, shape in layout.items()}
    unread = {key for key in layout if policy.unused(key) or key == LM_HEAD}
    assert found == {key: tuple(shape) for key, shape in layout.items() if key not in unread}
    assert sum(map(prod, layout.values())) > sum(map(prod, found.values())) > (4e8 if name == "smolvla" else 3e9)


@pytest.mark.parametrize(
    ("policy_class", "name", "given", "settings"), [CASES[index] for index in (0, 4, 5, 8, 10, 11, 13)]
)
def test_activations_are_near_those_that_torch_keeps(folders, monkeypatch, policy_class, name, given, settings):
    """The estimate of the blocks against what those of a real tiny policy keep of an update, and that of nothing else.

    Beside them are pixels, projector and heads: a third of a tiny policy, some 30 MB of a decision of OpenVLA.
    """
    policy = load(policy_class, folders / name, given, settings)
    batch = policy.precompute(policy(make_example("libero")))
    length = int((batch["prompt_tokens"] != policy.prompts.padding).sum())
    for module in ("openvla.inspection", "flow.memory"):
        monkeypatch.setattr(f"vla_policies.{module}.PROMPT_LENGTH", length)
    seen = {parameter.untyped_storage()._cdata for parameter in policy.parameters()}
    kept, inside = {}, []
    for _, block in blocks_of(policy.model):
        block.register_forward_pre_hook(lambda *_: inside.append(True))
        block.register_forward_hook(lambda *_: inside.clear())

    def pack(tensor):
        storage = tensor.untyped_storage()
        if inside and storage._cdata not in seen:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy.evaluate_actions(batch)
    real = sum(storage.nbytes() for storage in kept.values())
    decision = meta_policy(folders / name, family=policy_class.family, **settings).decision_memory()
    estimate = decision.activations()[0] - decision.held  # which no backward pass reads
    print(f"{name} {settings}: {real} kept, {estimate} estimated, {estimate / real:.2f}")
    assert estimate == pytest.approx(real, rel=0.15 if policy_class in (Pi0, SmolVLA) else 0.05)


def test_with_checkpointing_hidden_states_and_one_block_are_kept():
    """Worked out by hand for OpenVLA-OFT with two images in bfloat16: tokens times width of each block, twice."""
    decision = meta_policy("openvla_oft", num_images_in_input=2, value_head=False).decision_memory()
    (kept, recomputed, block), length = decision.activations(lowered=True), 1 + 2 * 256 + 32 + 8 * 7
    assert decision.cache == 0
    assert recomputed - block == 2 * (32 * length * 4096 + 2 * (23 * 261 * 1024 + 26 * 256 * 1152))
    assert recomputed / 1e9 == pytest.approx(0.3, abs=0.05)
    assert kept / 1e9 == pytest.approx(4.5, rel=0.05), "the norms of transformers keep float32 too"


# ---- the command


def test_the_command_prints_the_table(capsys):
    words = [
        "memory",
        "openvla_oft",
        "policy.lora_rank=32",
        "policy.dtype=bfloat16",
        "--gpus",
        "8",
        "policy.value_head=false",
    ]
    assert main([*words, "--micro-batch-size", "32", "--gpu", "20gb"]) == 0
    out = capsys.readouterr().out
    for part in (
        "109.1 M  adapters, trained, float32",
        "7,498.2 M  model, frozen, bfloat16",
        "does not fit",
        "left out: ",
    ):
        assert part in out
    rows = {line[:42].strip(): line[42:].split() for line in out.splitlines()}
    assert rows["1 GPU has all"][:4] == ["15.4", "0.4", "0.9", "-"]
    assert rows["8 shards"][:4] == ["1.9", "0.1", "0.1", "1.5/15.4"]
    assert rows["8 shards"][4:6] == ["10.4", "17.6"], "with activations"
    assert "settings: sharding.shards, sharding.compute=bf16, offload.optimizer=true, sharding.cpu_offload=true" in out


def test_settings_are_read_as_recipes_take_them():
    typed = ["policy.num_steps=null", "policy.lora_rank=32", "policy.benchmark=libero", "policy.method=flow_sde"]
    assert read_settings(typed) == {"lora_rank": 32, "benchmark": "libero", "method": "flow_sde"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["openvla", "lora_rank=32"],
            "'lora_rank=32' is no setting of a policy; type it as recipes take it: policy.lora_rank=32",
        ),
        (["openvla", "policy.lora_rnk=32"], "did you mean policy.lora_rank"),
        (["openvla", "policy.lora_rank=0"], "policy.lora_rank=0: must be greater than or equal to 1"),
        (["openvla", "--gpus", "8", "--shards", "3"], "--shards 3: must divide --gpus 8"),
        (["openvla", "--gpus", "0"], "--gpus 0: must be at least 1"),
        (
            ["openvla", "--gpu", "nangb"],
            "gpu=nangb: must be what a GPU has, such as 12gb, 16gb",
        ),
        (["small"], "small has no published size, it is made for an environment; pass a folder"),
        (["pi0"], "policy.config_name: which variant is it? such as pi0_libero or pi05_libero"),
        (["opnvla"], "unknown family or folder 'opnvla'; did you mean openvla or openvla_oft or smolvla?"),
        (["pi05"], "unknown family or folder 'pi05'; did you mean pi0"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert main(["memory", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


# ---- experiments


@pytest.mark.parametrize("experiment", LARGE[::6])
def test_the_table_of_hardware_has_what_an_experiments_settings_need(experiment):
    (line,) = re.findall(rf"\| `{experiment}` \|[ |\d]+\|\n", (ROOT / "docs" / "results.md").read_text())
    needed = row(experiment)
    assert [int(each) for each in re.findall(r" (\d+) ", line)] == pytest.approx(
        [int(each) for each in re.findall(r" (\d+) ", needed)], abs=1
    ), f"put this row there: {needed}"


@pytest.mark.parametrize("experiment", LARGE[1::7])
def test_the_table_of_gpus_has_what_an_experiments_settings_become(experiment):
    (line,) = re.findall(rf"\| `{experiment}` \|.*\|\n", (ROOT / "docs" / "hardware.md").read_text())
    assert line.strip() == cards(experiment)
