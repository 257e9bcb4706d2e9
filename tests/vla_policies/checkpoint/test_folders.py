"""Checkpoint folders are read whole or refused with one clear line, stream into memory, and are written again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from openvla_checkpoint import GOLDEN, OFT, act, make_checkpoint, observations
from paths import ROOT
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrl.envs.utils import ExplorationType

import vla_policies
from vla_policies import SmallVLA, SmallVLAConfig, load_policy
from vla_policies.checkpoint.hub import resolve
from vla_policies.checkpoint.weights import (
    INDEX,
    Loaded,
    cast,
    check_layout,
    list_weights,
    load_head,
    load_weights,
    save_weights,
)
from vla_policies.cli import main
from vla_policies.nn.dino_siglip import VisionConfig, heads_of
from vla_policies.nn.llama import LlamaConfig
from vla_policies.openvla.checkpoint import OpenVLACheckpoint
from vla_policies.openvla.model import Prismatic, PrismaticConfig
from vla_policies.openvla.oft import L1Head, ProprioProjector

SAVED_BEFORE = GOLDEN / "saved_before"


@pytest.fixture
def checkpoint(tmp_path):
    return make_checkpoint(tmp_path / "tiny")


@pytest.fixture
def sharded(checkpoint):
    save_weights(load_file(checkpoint / "model.safetensors"), checkpoint, max_shard_size=1_000_000)
    return checkpoint


def model_of(folder):
    """The tiny model on the meta device, and its unused keys."""
    model, _ = folder.empty_model()
    return model, model.unused


def hidden_size(folder):
    """Width of the language model, from its weights."""
    return list_weights(folder)["language_model.model.norm.weight"].shape[0]


def change_json(file, **entries):
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def inspect(folder, capsys):
    code = main(["inspect", str(folder)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


# Folders and hub ids


def test_a_path_needs_no_network(checkpoint, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("network"))
    assert resolve(checkpoint) == checkpoint
    assert resolve(str(checkpoint)) == checkpoint
    for name in ("checkpoints/mine", "openvla/openvla-7b"):  # a path, though it looks like a repository's name
        with pytest.raises(FileNotFoundError, match=f"no folder {name}; pass a checkpoint folder, or .* as hf:NAME"):
            load_policy(name)


def test_a_hub_id_is_downloaded_without_code(checkpoint, monkeypatch):
    asked = {}

    def download(name, **options):
        asked.update(name=name, **options)
        return str(checkpoint)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("hf:openvla/openvla-7b") == checkpoint
    assert asked["name"] == "openvla/openvla-7b"
    assert {pattern.rpartition(".")[2] for pattern in asked["allow_patterns"]} == {"json", "safetensors", "model", "pt"}
    assert all("--" in pattern for pattern in asked["allow_patterns"] if pattern.endswith("pt"))


def test_what_is_neither_folder_nor_repository_is_one_clear_error(checkpoint, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no folder .*missing; pass a checkpoint folder"):
        resolve(checkpoint / "missing")
    with pytest.raises(FileNotFoundError, match=r"config.json is a file; pass the checkpoint folder"):
        resolve(checkpoint / "config.json")

    def offline(name, **options):
        raise OSError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(FileNotFoundError, match=r"no route to the hub.*hf download openvla/openvla-7b --local-dir"):
        resolve("hf:openvla/openvla-7b")


def test_a_folder_is_read_and_its_statistics_file_wins(checkpoint):
    folder = OpenVLACheckpoint.read(checkpoint)
    assert folder.family == "openvla"
    assert not folder.family_is_known
    assert folder.config["text_config"]["hidden_size"] == hidden_size(checkpoint)
    assert folder.preprocessor["means"]
    assert {"tokenizer.json", "preprocessor_config.json"} <= folder.files.keys()
    (checkpoint / "dataset_statistics.json").write_text('{"other": {}}')
    assert list(OpenVLACheckpoint.read(checkpoint).statistics) == ["other"]
    (checkpoint / "dataset_statistics.json").unlink()
    assert list(OpenVLACheckpoint.read(checkpoint).statistics) == ["golden_ds"]


def test_the_parts_of_openvla_oft_are_found(tmp_path):
    folder = OpenVLACheckpoint.read(make_checkpoint(tmp_path, heads=True, value_head=True))
    assert folder.family == "openvla_oft"
    assert folder.family_is_known
    assert folder.action_head.name == "action_head--golden_checkpoint.pt"
    assert folder.proprio_projector.name == "proprio_projector--golden_checkpoint.pt"
    assert folder.value_head_in_weights
    shutil.copy(folder.action_head, tmp_path / "action_head--150000_checkpoint.pt")
    with pytest.raises(ValueError, match=r"2 files for the same part: action_head--150000_checkpoint.pt, action_"):
        OpenVLACheckpoint.read(tmp_path)


def test_what_is_no_openvla_checkpoint_is_refused(checkpoint, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config.json"):
        OpenVLACheckpoint.read(tmp_path)
    (checkpoint / "vla_torchrl.json").write_text('{"family": "openvla"}')
    with pytest.raises(ValueError, match="a checkpoint of openvla, not of openvla_oft"):
        OpenVLACheckpoint.read(checkpoint, "openvla_oft")
    assert OpenVLACheckpoint.read(checkpoint, "openvla").family_is_known
    (checkpoint / "preprocessor_config.json").rename(checkpoint / "away")
    with pytest.raises(FileNotFoundError, match=r"no preprocessor_config.json"):
        OpenVLACheckpoint.read(checkpoint)
    (checkpoint / "preprocessor_config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must be a JSON object"):
        OpenVLACheckpoint.read(checkpoint)
    change_json(checkpoint / "config.json", model_type="llama")
    with pytest.raises(ValueError, match="a checkpoint of 'llama', not of openvla or openvla_oft"):
        OpenVLACheckpoint.read(checkpoint)
    (checkpoint / "config.json").write_text('{"model_type":')
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        OpenVLACheckpoint.read(checkpoint)


def test_a_published_folder_loads_as_either_family(checkpoint):
    assert OpenVLACheckpoint.read(checkpoint, "openvla_oft").path == checkpoint


# Weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_fill_a_module_on_the_meta_device(checkpoint, dtype):
    folder = OpenVLACheckpoint.read(checkpoint)
    model, unused = model_of(folder)
    model.projector.requires_grad_(False)
    cast(model, dtype)
    spare = load_weights(model, folder.weights, unused=unused)
    weights = load_file(checkpoint / "model.safetensors")
    state = model.state_dict()
    assert {*state, *spare} == weights.keys()
    assert not state.keys() & spare.keys()
    for key, tensor in state.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, weights[key].to(tensor.dtype))
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, _ in model.named_parameters() if not name.startswith("projector.")}


def test_shards_hold_the_same_weights_as_one_file(sharded):
    assert not (sharded / "model.safetensors").exists()
    index = json.loads((sharded / INDEX).read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert all((sharded / file).stat().st_size < 2_200_000 for file in files)
    original = load_file(GOLDEN / "openvla_tiny" / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in original.values())
    entries = list_weights(sharded)
    assert entries.keys() == original.keys()
    assert all(torch.equal(entries[key].read(), tensor) for key, tensor in original.items())


def test_saving_again_leaves_nothing_stale(sharded):
    before = load_file(GOLDEN / "openvla_tiny" / "model.safetensors")
    assert save_weights(before, sharded) == ["model.safetensors"]
    assert sorted(file.name for file in sharded.glob("model*")) == ["model.safetensors"]
    save_weights(before, sharded, max_shard_size=3_000_000)
    files = set(json.loads((sharded / INDEX).read_text())["weight_map"].values())
    assert {file.name for file in sharded.glob("model*")} == {*files, INDEX}


def test_weights_can_be_saved_over_the_file_they_were_loaded_from(checkpoint):
    folder = OpenVLACheckpoint.read(checkpoint)
    model, unused = model_of(folder)
    spare = load_weights(model, folder.weights, unused=unused)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    save_weights({**model.state_dict(), **spare}, checkpoint)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert list_weights(checkpoint).keys() == list_weights(GOLDEN / "openvla_tiny").keys()


def test_a_missing_or_foreign_shard_is_named(sharded):
    shards = sorted(sharded.glob("model-*.safetensors"))
    shards[1].rename(sharded / "away")
    with pytest.raises(FileNotFoundError, match=f"lacks 1 of {len(shards)} shards of its weights: {shards[1].name}"):
        list_weights(sharded)
    shutil.copy(shards[0], shards[1])
    with pytest.raises(ValueError, match=r"the shards of .* they lack .* copy them again"):
        list_weights(sharded)
    (sharded / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="not an index of shards"):
        list_weights(sharded)
    (sharded / INDEX).unlink()
    with pytest.raises(FileNotFoundError, match="has no weights"):
        list_weights(sharded)


@pytest.mark.parametrize("keep", [0, 4, 3000, 1_000_000])
def test_a_corrupt_file_is_named(checkpoint, keep):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated or no safetensors file"):
        list_weights(checkpoint)


def test_keys_and_shapes_that_do_not_fit_are_listed(checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    del weights["projector.fc2.bias"]
    weights["projector.fc4.bias"] = torch.zeros(3)
    size = hidden_size(checkpoint)
    weights["projector.fc3.weight"] = weights["projector.fc3.weight"][:, 1:].contiguous()
    save_file(weights, checkpoint / "model.safetensors")
    folder = OpenVLACheckpoint.read(checkpoint)
    model, unused = model_of(folder)
    with pytest.raises(ValueError, match="does not fit the model") as error:
        load_weights(model, list_weights(checkpoint), unused=unused)
    for part in (
        str(checkpoint),
        "lacks projector.fc2.bias",
        "unknown projector.fc4.bias",
        f"projector.fc3.weight [{size}, {size - 1}] instead of [{size}, {size}]",
    ):
        assert part in str(error.value)
    assert all(parameter.is_meta for parameter in model.parameters()), "checked before anything is read"


def test_the_full_size_layout_fits_but_for_the_documented_unused_keys():
    layout = json.loads((GOLDEN / "openvla_7b_full_layout.json").read_text())
    shapes = {key: tuple(shape) for key, shape in layout.items()}
    names = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
    vision = VisionConfig.from_shapes(shapes, heads_of({"timm_model_ids": names}))
    with torch.device("meta"):
        model = Prismatic(PrismaticConfig(vision, LlamaConfig()))
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    check_layout(expected, shapes, unused=vision.unused)
    unused = shapes.keys() - expected.keys()
    documented = ("featurizer.blocks.23.", "featurizer.blocks.26.", "featurizer.norm.", "featurizer.attn_pool.")
    assert unused
    assert all(any(part in key for part in documented) for key in unused)
    assert {part for part in documented if any(part in key for key in unused)} == set(documented)


def test_buffers_are_loaded_and_integers_keep_their_type(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    save_weights(model.state_dict(), tmp_path, max_shard_size=1)
    assert len(list(tmp_path.glob("model-*"))) == len(model.state_dict())
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    load_weights(empty.to(torch.float64), list_weights(tmp_path))
    assert empty[1].running_mean.dtype == torch.float64
    assert empty[1].num_batches_tracked.dtype == torch.int64
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in empty.state_dict().items())


MEMORY = """
import sys, torch
from pathlib import Path
from torch import nn
from vla_policies.checkpoint.weights import list_weights, load_weights

def memory(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().split("\\n") if name in line)

with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(75)))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again here
before = memory("VmRSS")
load_weights(model.to(getattr(torch, sys.argv[2])), list_weights(Path(sys.argv[1])))
print((memory("VmHWM") - before) / (sum(p.numel() * p.element_size() for p in model.parameters()) / 1024))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory through Linux's /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_peaks_at_no_more_than_a_fifth_over_the_weights(tmp_path, dtype):
    weights = {f"{number}.weight": torch.ones(1000, 1000, dtype=torch.bfloat16) for number in range(75)}
    save_weights(weights, tmp_path, max_shard_size=100_000_000)
    command = [sys.executable, "-c", MEMORY, str(tmp_path), dtype]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    assert 0.95 < float(done.stdout) < 1.2


# Heads


def test_heads_are_read_from_pickles_of_tensors_only(tmp_path):
    make_checkpoint(tmp_path, heads=True)
    folder = OpenVLACheckpoint.read(tmp_path)
    size = hidden_size(tmp_path)
    head, projector = L1Head(size, 7), ProprioProjector(8, size).bfloat16()
    load_head(head, folder.action_head)
    load_head(projector, folder.proprio_projector)
    stored = load_file(OFT / "action_head--golden_checkpoint.safetensors")
    assert all(torch.equal(tensor, stored[f"module.{key}"]) for key, tensor in head.state_dict().items())
    assert projector.fc1.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"proprio_projector--golden_checkpoint.pt does not fit .*fc1.weight"):
        load_head(ProprioProjector(14, size), folder.proprio_projector)


def test_a_head_stays_on_its_device():
    sent = []

    class Read(torch.Tensor):
        def to(self, *, device, **_):
            sent.append(torch.device(device).type)
            return self

    head = nn.Module()
    with FakeTensorMode():  # of a machine with GPUs: FSDP has put the heads of a sharded policy there before
        head.weight = nn.Parameter(torch.empty(3, device="cuda"))
    stored = Loaded(Path("head.pt"), "weight", (3,), torch.float32, torch.ones(3).as_subclass(Read))
    load_weights(head, {"weight": stored})
    assert sent == ["cuda"]


def test_a_head_that_would_run_code_is_refused(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    torch.save({"fc1.weight": Trap()}, tmp_path / "proprio_projector--1_checkpoint.pt")
    with pytest.raises(ValueError, match=r"would execute code \(posix.mkdir\)"):
        load_head(ProprioProjector(8, 4), tmp_path / "proprio_projector--1_checkpoint.pt")
    assert not (tmp_path / "sprung").exists()


def test_a_truncated_head_is_refused(tmp_path):
    file = tmp_path / "head.pt"
    torch.save(ProprioProjector(8, 4).state_dict(), file)
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"head.pt is truncated"):
        load_head(ProprioProjector(8, 4), file)


# Writing


def test_a_folder_that_is_written_has_everything_that_was_read(checkpoint, tmp_path):
    folder = OpenVLACheckpoint.read(checkpoint)
    weights = {key: entry.read().float() for key, entry in folder.weights.items()}
    weights["projector.fc1.bias"] = weights["projector.fc1.bias"].bfloat16()
    folder.write(tmp_path / "copy", weights=weights, options={"family": "openvla", "benchmark": "libero"})
    again = OpenVLACheckpoint.read(tmp_path / "copy")
    assert again.files == folder.files
    assert again.statistics == folder.statistics
    assert again.config == {**folder.config, "torch_dtype": "float32"}
    assert again.options == {"family": "openvla", "benchmark": "libero"}
    assert again.weights.keys() == folder.weights.keys()


# inspect and load_policy


def test_inspect_describes_a_published_checkpoint(checkpoint, capsys):
    code, out, _ = inspect(checkpoint, capsys)
    assert code == 0
    assert "MISSING" not in out
    for part in (
        "openvla, or openvla_oft",
        "golden_ds (7 action dimensions, q99 or min_max)",
        "2,330,348 parameters",
        "bfloat16, 4.7 MB in 1 file",
        "no: a new one is initialised",
        "bicubic, not cropped; with layout='official' lanczos3 after a JPEG round trip, the central 0.9 of the area",
    ):
        assert part in out


def test_inspect_describes_openvla_oft(tmp_path, capsys):
    code, out, _ = inspect(make_checkpoint(tmp_path, heads=True, value_head=True), capsys)
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith(("LoRA", "value")))
    assert lines["family"] == "openvla_oft"
    assert lines["head"] == "l1"
    assert lines["layout"] == "official"
    assert lines["pixels"] == "lanczos3 after a JPEG round trip, the central 0.9 of the area"
    assert lines["chunk"] == "not in the files; set num_action_chunks"
    assert lines["proprioception"] == "proprio_projector--golden_checkpoint.pt"
    assert "in the weights" in out


def test_inspect_says_what_our_own_options_say(tmp_path, capsys):
    make_checkpoint(tmp_path)
    options = {
        "family": "openvla_oft",
        "head": "tokens",
        "layout": "rlinf",
        "num_action_chunks": 8,
        "num_images_in_input": 2,
        "benchmark": "libero",
        "use_proprio": True,
    }
    (tmp_path / "vla_torchrl.json").write_text(json.dumps(options))
    code, out, _ = inspect(tmp_path, capsys)
    facts = {line[:15].strip(): line[16:] for line in out.splitlines()}
    assert (facts["layout"], facts["chunk"], facts["images"], facts["benchmark"]) == ("rlinf", "8", "2", "libero")
    assert facts["pixels"] == "bicubic, not cropped"
    assert code == 1
    assert facts["MISSING"].startswith("proprioception: copy proprio_projector--*.pt")


def test_inspect_lists_what_is_missing(sharded, capsys):
    (sharded / "tokenizer.json").unlink()
    (sharded / "dataset_statistics.json").write_text("{}")
    next(sharded.glob("model-00002-*")).unlink()
    code, out, _ = inspect(sharded, capsys)
    missing = [line[16:] for line in out.splitlines() if line.startswith("MISSING")]
    assert code == 1
    assert [line.partition(":")[0] for line in missing] == ["statistics", "tokenizer", "weights"]


def test_inspect_of_what_is_no_checkpoint_is_one_line(tmp_path, capsys):
    code, out, err = inspect(tmp_path, capsys)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert "no config.json" in err
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    code, out, err = inspect(tmp_path, capsys)
    assert code == 2
    assert err.count("\n") == 1
    assert "'gpt2'" in err


def test_inspect_describes_the_small_policy(tmp_path, capsys):
    SmallVLA(SmallVLAConfig(action_low=(-1.0,) * 4, action_high=(1.0,) * 4, state_dim=4)).save_pretrained(tmp_path)
    code, out, _ = inspect(tmp_path, capsys)
    assert code == 0
    assert "small" in out
    assert "float32" in out
    with pytest.raises(ValueError, match=r"SmallVLA has no settings \['benchmark'\]"):
        load_policy(tmp_path, benchmark="libero")


def test_load_policy_takes_openvla_checkpoints(tmp_path):
    policy = load_policy(make_checkpoint(tmp_path / "a"), benchmark="libero")
    assert type(policy).__name__ == "OpenVLA"
    policy = load_policy(make_checkpoint(tmp_path / "b", heads=True), benchmark="libero", num_images_in_input=2)
    assert type(policy).__name__ == "OpenVLAOFT"


@pytest.mark.parametrize("family", ["small", "small_flow"])
def test_a_folder_that_an_earlier_version_saved_acts_as_it_did(family):
    """Recorded by the version before the registry (commit a10f296); settings that are no more were taken out of it."""
    folder = SAVED_BEFORE / family
    policy = load_policy(folder).eval()
    assert policy.family == family
    with np.load(folder / "recorded.npz") as stored:
        recorded = {name: torch.from_numpy(stored[name]) for name in stored.files}
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (2, 24, 32, 3), dtype=torch.uint8, generator=generator)
    seen = observations(
        images, torch.randn(2, 4, generator=generator), instructions=("push the puck", "open the drawer")
    )
    for kind in ("deterministic", "random"):
        torch.manual_seed(5)
        with torch.no_grad():
            td = act(policy, seen.clone(), ExplorationType[kind.upper()])
        expected = {name.partition("/")[2]: tensor for name, tensor in recorded.items() if name.startswith(kind)}
        assert expected
        for (
            key,
            tensor,
        ) in expected.items():  # recorded with one thread; more of them, or another processor, round otherwise
            if tensor.is_floating_point():
                assert torch.allclose(td[key], tensor, rtol=1e-5, atol=1e-6), key
            else:
                assert torch.equal(td[key], tensor), key


def test_a_name_that_vla_policies_does_not_have():
    assert set(vla_policies.__all__) == set(dir(vla_policies))
    with pytest.raises(AttributeError, match="No vla_policies attribute OpenVLB"):
        vla_policies.OpenVLB  # noqa: B018
