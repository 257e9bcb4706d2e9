"""Damaged and malicious files in every place where one is loaded.

Survived: refused in a line that names the file, gone on from the checkpoint before, or loaded with the same content.
A flipped bit in the weights of a published checkpoint, which has no checksums, is nothing that anybody could notice
and not tried.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import shutil
import tempfile
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.storm._checkpoints import Site, fingerprint, ours, published, resumable, same, train
from benchmarks.storm.tally import Tally

COUNT = 400
_PAGE = 4096
_SHARES = {"training states": 0.35, "policies": 0.35, "published checkpoints": 0.25, "LIBERO's initial states": 0.05}
_MOST_MEMORY = 100_000_000  # bytes, for initial states of 50 kB


def run(count: int = COUNT, seed: int = 0) -> Tally:
    tally, rng = Tally("corruption: damaged and malicious files"), random.Random(seed)
    storms = (_training, _policies, _published, _libero)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = Path(folder)
        (root / "published").mkdir()
        foreign = published(root / "published")
        for storm, share in zip(storms, _SHARES.values(), strict=True):
            storm(tally, rng, max(1, round(count * share)), root, foreign)
    return tally


# ---- faults of any file


def _flip(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def _zero(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(0, len(content), _PAGE)
    page = content[start : start + _PAGE]
    return content[:start] + bytes(len(page)) + content[start + len(page) :]


def _truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def _append(content: bytes, rng: random.Random) -> bytes:
    return content + rng.randbytes(rng.randrange(1, 100))


class _Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def _pickles(trap: _Trap) -> list[bytes]:
    """A trap in the formats that loaders may take for theirs."""
    found = [pickle.dumps({"weight": trap}, protocol) for protocol in (0, 2, 4)]
    for zipped in (True, False):
        torch.save({"format": trap}, buffer := io.BytesIO(), _use_new_zipfile_serialization=zipped)
        found.append(buffer.getvalue())
    return found


_ANY = {"flipped bit": _flip, "zeroed page": _zero, "truncated": _truncate, "appended bytes": _append}


# ---- training states


_FILES = ("training.json", "process_00000.json", "tensors/process_00000.safetensors")


def _training(tally: Tally, rng: random.Random, count: int, root: Path, _: list[Site]) -> None:
    after = train(root / "run", 2)
    kinds = [*_ANY, "exchanged", "malicious", "latest", "both damaged", "checksums"]
    for number in range(count):
        folder = root / "damaged"
        shutil.copytree(root / "run", folder, symlinks=True)
        newest, older = (folder / "checkpoints" / f"step_0000000{step}" for step in (2, 1))
        kind, trap, usable = kinds[number % len(kinds)], _Trap(root / f"sprung{number}"), [2, 1]
        file = rng.choice(_FILES)
        what = f"{file}, number {number}"
        if kind in _ANY:
            _change(newest / file, lambda content, kind=kind: _ANY[kind](content, rng))
        elif kind == "exchanged":
            for each in _FILES if rng.random() < 0.5 else [file]:
                shutil.copy(older / each, newest / each)
            if rng.random() < 0.5:
                shutil.copy(older / "SHA256SUMS", newest / "SHA256SUMS")
        elif kind == "malicious":
            (newest / file).write_bytes(rng.choice(_pickles(trap)))
        elif kind == "latest":
            link = folder / "checkpoints" / "latest"
            link.unlink()
            what = rng.choice(["gone", "dangling", "a folder", "a file"])
            if what == "dangling":
                link.symlink_to("step_00000009")
            elif what != "gone":
                link.mkdir() if what == "a folder" else link.write_text("step_00000002")
            if rng.random() < 0.5:
                _change(newest / file, lambda content: _truncate(content, rng))
        elif kind == "both damaged":
            usable = []
            for checkpoint in (newest, older):
                _change(checkpoint / file, lambda content: _zero(_truncate(content, rng) or b"0", rng))
        elif (newest / "SHA256SUMS").exists():
            _change(newest / "SHA256SUMS", lambda content: rng.choice(list(_ANY.values()))(content, rng))
        outcome, why = _resume(folder, after, usable)
        tally.note("wrong" if trap.folder.exists() else outcome, kind, f"of {what}: {why}")
        shutil.rmtree(folder)


def _resume(folder: Path, after: dict[int, Any], usable: list[int]) -> tuple[str, str]:
    run = resumable(folder)
    try:
        with _quiet():
            found = run.resume()
    except Exception as error:
        by_name = not usable and "step_00000001" in str(error) and "step_00000002" in str(error)
        return ("survived" if by_name and _one_line(error) else "lost"), repr(error)[:200]
    if found is None or not usable or found not in usable:
        return "wrong", f"went on from {found}"
    return ("survived" if same(fingerprint(run.policy), after[found]) else "wrong"), f"another state {found}"


# ---- policies that we saved


def _policies(tally: Tally, rng: random.Random, count: int, root: Path, foreign: list[Site]) -> None:
    sites = ours(root / "ours", foreign)
    expected = [fingerprint(site.load(site.folder)) for site in sites]
    kinds = [*_ANY, "exchanged", "malicious"]
    for number in range(count):
        which = number % len(sites)
        site, kind = sites[which], rng.choice(kinds)
        folder = root / "damaged"
        shutil.copytree(site.folder, folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        # Weights and small files equally often.
        large = [path for path in files if path.suffix in (".safetensors", ".pt")]
        file = rng.choice(large if rng.random() < 0.5 else [path for path in files if path not in large])
        trap = _Trap(root / f"sprung_policy{number}")
        if kind in _ANY:
            _change(file, lambda content, kind=kind: _ANY[kind](content, rng))
        elif kind == "malicious":
            file.write_bytes(rng.choice(_pickles(trap)))
        else:
            file = folder / "model.safetensors"
            weights = load_file(file)
            key = rng.choice([name for name, tensor in weights.items() if tensor.is_floating_point()])
            save_file({**weights, key: weights[key] + 1}, file)
        outcome, why = _load(site, folder, expected[which])
        what = f"of {site.name}/{file.relative_to(folder)}, number {number}: {why}"
        tally.note("wrong" if trap.folder.exists() else outcome, kind, what)
        shutil.rmtree(folder)


# ---- published checkpoints, without checksums


def _published(tally: Tally, rng: random.Random, count: int, root: Path, foreign: list[Site]) -> None:
    openvla, _, pi0 = foreign
    index, statistics = "model.safetensors.index.json", "dataset_statistics.json"
    bounds = ("q01", "q99")
    faults: list[tuple[str, Site, str, Callable[[Path], object]]] = []
    for site in foreign:
        for file in sorted(path for path in site.folder.rglob("*") if path.is_file()):
            name = str(file.relative_to(site.folder))
            if name in ("generation_config.json", "keys.json", "tokenizer_config.json"):  # not read
                continue
            faults.append(
                ("truncated", site, name, lambda path: _change(path, lambda content: _truncate(content, rng)))
            )
            faults += [
                ("malicious", site, name, lambda path, n=n: path.write_bytes(_pickles(_Trap(root / "sprung"))[n]))
                for n in range(5 if path_is_tensors(name) else 1)
            ]
            if path_is_tensors(name):
                faults += [("not finite", site, name, lambda path: _spoil(path, rng))] * 3
    for shard in ("../model.safetensors", "/etc/passwd", None, 3, ["a"], {}, "", "..", "a/b.safetensors", "x\0"):
        faults.append(("shard index", openvla, index, lambda path, shard=shard: _edit(path, _shard(shard))))
    for content in ([], {}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": "x"}, None, 3):
        faults.append(("shard index", openvla, index, lambda path, c=content: path.write_text(json.dumps(c))))
    for name in bounds:
        for value in ([float("nan")] * 7, [float("inf")] * 7, [], "x", 3, None, [1.0], [[1.0]] * 7, ["a"] * 7, {}):
            change = _statistic(name, value)
            faults.append(("statistics", openvla, statistics, lambda path, c=change: _edit(path, c)))
    faults.append(("statistics", openvla, statistics, lambda path: _edit(path, _swap(bounds))))
    for value in ([], {"a": 3}, {"a": {"action": 3}}, {"a": {}}, "x"):
        faults.append(("statistics", openvla, statistics, lambda path, v=value: path.write_text(json.dumps(v))))
    for name in ("mean", "std"):
        for value in ([float("nan")] * 8, [float("-inf")] * 8, [], "x", 3, None, [1.0], ["a"] * 8):
            change = _statistic(name, value)
            faults.append(("statistics", pi0, "assets/tiny/norm_stats.json", lambda path, c=change: _edit(path, c)))
    faults.append(
        ("statistics", pi0, "assets/tiny/norm_stats.json", lambda path: _edit(path, _statistic("std", [-1.0] * 8)))
    )
    adapters = _adapter(root, openvla)
    for key, value in [
        *(
            (key, value)
            for key in ("r", "lora_alpha")
            for value in (float("nan"), 0, -1, None, "x", float("inf"), 10**9, [])
        ),
        *((key, ["x"]) for key in ("rank_pattern", "alpha_pattern")),
        *((key, {"proj": float("nan")}) for key in ("rank_pattern", "alpha_pattern")),
        *(("peft_type", value) for value in ("IA3", None, 3, "CODE")),
        ("nonsense", 3),
    ]:
        if (key, value) in (("lora_alpha", 10**9), ("nonsense", 3)):  # absurd, but a number; peft's to judge
            continue
        change = lambda content, key=key, value=value: content.update({key: value})  # noqa: E731
        faults.append(("adapter", adapters, "adapter_config.json", lambda path, c=change: _edit(path, c)))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        faults += [("adapter", adapters, name, lambda path: _change(path, lambda content: _truncate(content, rng)))] * 3
    faults += [("adapter", adapters, "adapter_model.safetensors", lambda path: _spoil(path, rng))] * 4
    rng.shuffle(faults)
    for number in range(count):
        kind, site, name, change = faults[number % len(faults)]
        folder = root / "damaged"
        shutil.copytree(site.folder, folder)
        change(folder / name)
        outcome, why = _load(site, folder, None)
        outcome = "wrong" if (root / "sprung").exists() else outcome
        tally.note(outcome, kind, f"of published {site.name}/{name}, number {number}: {why}")
        shutil.rmtree(folder)


def path_is_tensors(name: str) -> bool:
    return name.endswith((".pt", ".safetensors"))


def _adapter(root: Path, base: Site) -> Site:
    from vla_policies.checkpoint.lora import add_lora, load_adapter, save_adapter

    folder, policy = root / "adapter", base.load(base.folder)
    add_lora(policy, rank=2)
    save_adapter(policy, folder)
    (folder / "SHA256SUMS").unlink(missing_ok=True)

    def load(path: Path) -> Any:
        load_adapter(policy := base.load(base.folder), path)
        return policy

    return Site("adapter", folder, load)


def _spoil(file: Path, rng: random.Random) -> None:
    """Put a number that is none into a tensor that is used."""
    safe = file.suffix == ".safetensors"
    weights = load_file(file) if safe else torch.load(file, weights_only=True)
    unused = ["featurizer.blocks.2", ".attn_pool", "gemma_expert.lm_head"]
    if any(file.parent.glob("vision_backbone--*")) and file.name == "model.safetensors":
        unused.append("vision_backbone.")  # FiLM's file has them
    tensor = weights[rng.choice([name for name in weights if not any(part in name for part in unused)])]
    tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice([float("nan"), float("inf"), -float("inf")])
    save_file(weights, file) if safe else torch.save(weights, file)


def _edit(file: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def _shard(name: object) -> Callable[[Any], object]:
    def change(content: Any) -> None:
        weights = content["weight_map"]
        weights[min(weights)] = name

    return change


def _entries(content: Any) -> list[Any]:
    content = content.get("norm_stats", content)
    return [content["actions"]] if "actions" in content else [entry["action"] for entry in content.values()]


def _statistic(name: str, value: object) -> Callable[[Any], object]:
    return lambda content: [entry.update({name: value}) for entry in _entries(content)]


def _swap(names: tuple[str, str]) -> Callable[[Any], object]:
    low, high = names
    return lambda content: [entry.update({low: entry[high], high: entry[low]}) for entry in _entries(content)]


# ---- LIBERO's initial states


def _libero(tally: Tally, rng: random.Random, count: int, root: Path, _: list[Site]) -> None:
    from vla_envs.libero import package

    reconstruct, file = np.empty(0).__reduce__()[0], root / "init_files" / "libero_goal" / "task.pruned_init"
    file.parent.mkdir(parents=True)

    class Huge:
        def __reduce__(self) -> Any:
            return reconstruct, (np.ndarray, (20_000_000,), b"b")

    whole = pickle.dumps(np.ones((50, 80)), 2)
    contents = {
        "bomb": lambda: bytes(10**9),
        "huge array": lambda: pickle.dumps(Huge(), 2),
        "huge memo": lambda: b"\x80\x02}r\xff\xff\xff\x07.",
        "malicious": lambda: pickle.dumps(_Trap(root / "sprung_libero"), 2),
        "not finite": lambda: pickle.dumps(np.full((50, 80), np.nan), 2),
        "truncated": lambda: _truncate(whole, rng),
        "text": lambda: pickle.dumps("x", 2),
    }
    for number in range(count):
        kind, make = list(contents.items())[number % len(contents)]
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", make())
        package.initial_states.cache_clear()
        outcome, why = "wrong", "loaded"
        tracemalloc.start()
        try:
            with mock.patch.object(package, "package_folder", return_value=root):
                package.initial_states("goal", "task")
        except Exception as error:
            by_name = isinstance(error, RuntimeError) and str(file) in str(error)
            outcome, why = ("survived" if by_name else "lost"), repr(error)[:200]
        if tracemalloc.get_traced_memory()[1] > _MOST_MEMORY:
            outcome, why = "lost", "it took more than 100 MB"
        tracemalloc.stop()
        outcome = "wrong" if (root / "sprung_libero").exists() else outcome
        tally.note(outcome, f"initial states: {kind}", why)


# ---- what came of it


def _load(site: Site, folder: Path, expected: dict[str, Any] | None) -> tuple[str, str]:
    try:
        with _quiet():
            policy = site.load(folder)
    except (ValueError, FileNotFoundError) as error:
        names = any(path.name in str(error) for path in site.folder.rglob("*")) or str(folder) in str(error)
        named = names or "statistics" in str(error) or "norm_stats" in str(error)
        return ("survived" if named and _one_line(error) else "lost"), repr(error)[:200]
    except Exception as error:
        return "lost", repr(error)[:200]
    if expected is not None and same(fingerprint(policy), expected):
        return "survived", ""
    return "wrong", "loaded"


def _one_line(error: Exception) -> bool:
    return "\n" not in str(error)


def _change(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


def _quiet() -> contextlib.AbstractContextManager[object]:
    return contextlib.redirect_stdout(io.StringIO())
