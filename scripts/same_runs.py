"""Run recipes in another tree and in this one, and compare weights and metrics to the bit.

``python scripts/same_runs.py BEFORE OUT [CASE ...]``: ``BEFORE`` is a checkout of another commit with the same
environment. Runs that are in ``OUT/before`` already are not run again. Each case runs with one thread; with ``--kill``
the runs of this tree are ended by SIGKILL after their first iteration, and typed again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

HERE = Path(__file__).parents[1]
TIMES = re.compile(r"^(time/|decisions_per_s|env_steps_per_s|fps|.*per_second)")
ENV = ["env.num_envs=4", "env.num_workers=1", "env.max_episode_steps=12", "env.image_size=32"]
COMMON = [*ENV, "eval.trials=2", "eval.videos=1"]
CLONED = ["demonstrations.episodes=2", "cloning.steps=4", "demonstrations.max_steps=150"]
PPO = [*COMMON, "iterations=3", "evaluate_every=2", "collector.decisions=4", "update.epochs=2"]
PPO += ["update.minibatch_size=6", "update.micro_batch_size=4", "update.critic_warmup_steps=1"]
GRPO = [*COMMON, "iterations=3", "evaluate_every=2", "group_size=2", "collector.groups=2", "collector.max_groups=3"]
OPENVLA = [
    "policy=openvla_oft",
    "policy.layout=official",
    "policy.use_proprio=false",
    "policy.num_action_chunks=2",
    "policy.value_head=true",
]
PI0 = ["policy=pi0", "policy.config_name=pi0_metaworld", "policy.num_steps=2", "policy.num_action_chunks=2"]
CASES: dict[str, tuple[int, str, list[str]]] = {
    "ppo_small": (1, "ppo", [*PPO, *CLONED, "eval.sampled=true"]),
    "ppo_flow": (1, "ppo", [*PPO, *CLONED, "policy=small_flow"]),
    "grpo_small": (1, "grpo", [*GRPO, *CLONED]),
    "grpo_kl": (1, "grpo", [*GRPO, *CLONED, "env=metaworld_button", "loss.reference_kl_coeff=0.1"]),
    "sft_small": (1, "sft", [*COMMON, *CLONED, "demonstrations.heldout=0.5", "heldout_every=2", "checkpoint_every=2"]),
    "sft_flow": (1, "sft", [*COMMON, *CLONED, "policy=small_flow", "checkpoint_every=2"]),
    "ppo_openvla": (1, "ppo", [*PPO, *OPENVLA, "policy.lora_rank=2", "policy.checkpoint={openvla}"]),
    "ppo_pi0": (1, "ppo", [*PPO, *PI0, "policy.checkpoint={pi0}"]),
    "ppo_two": (2, "ppo", [*PPO, *CLONED, "eval.trials=3"]),
    "grpo_two": (2, "grpo", [*GRPO, *CLONED, "eval.trials=3", "collector.max_groups=4"]),
}


def checkpoints(out: Path) -> dict[str, Path]:
    """Make tiny checkpoints in the real layouts, once."""
    kinds = {"openvla": "openvla_oft_rlinf", "pi0": "pi0"}
    for name, kind in kinds.items():
        if not (out / name).exists():
            command = [sys.executable, "-m", "vla_policies", "tiny", kind, "--to", str(out / name)]
            subprocess.run(command, check=True, cwd=HERE, env=os.environ | {"PYTHONPATH": str(HERE)})
    return {name: out / name for name in kinds}


def start(tree: Path, case: str, folder: Path, made: dict[str, Path]) -> subprocess.Popen:
    """Start a recipe of a tree."""
    processes, recipe, settings = CASES[case]
    launcher = []
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    typed = [each.format(**made) for each in settings]
    command = [sys.executable, *launcher, str(tree / "recipes" / f"{recipe}.py"), *typed, f"hydra.run.dir={folder}"]
    folder.mkdir(parents=True, exist_ok=True)
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    with open(folder.with_suffix(".log"), "a") as log:
        return subprocess.Popen(command, cwd=tree, env=environ, stdout=log, stderr=log, start_new_session=True)


def run(tree: Path, case: str, folder: Path, made: dict[str, Path], kill: bool = False) -> None:
    """Run a recipe to its end, killed once in between if asked."""
    process = start(tree, case, folder, made)
    if kill:
        metrics = folder / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and '"step": 1' in metrics.read_text()):
            time.sleep(0.02)
        time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process = start(tree, case, folder, made)
    if process.wait():
        raise SystemExit(f"{case} failed in {tree}: {folder.with_suffix('.log').read_text()[-3000:]}")


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Return all that was measured and is not a time, by iteration."""
    found: dict[int, dict[str, float]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        numbers = {key: value for key, value in line.items() if not TIMES.match(key)}
        found.setdefault(line["step"], {}).update(numbers)
    return found


def compare(before: Path, now: Path, tolerance: float) -> list[str]:
    """List what differs between two runs; what only one of them logs is named once."""
    wrong = []
    for file in sorted(path.name for path in (before / "policy").rglob("*.safetensors")):
        [first], [second] = ([*(each / "policy").rglob(file)] for each in (before, now))
        tensors, others = load_file(first), load_file(second)
        if tensors.keys() != others.keys():
            wrong.append(f"{file}: other tensors")
        wrong += [
            f"{file}: {name} differs by {(tensors[name].double() - others[name].double()).abs().max():.3g}"
            for name in tensors.keys() & others.keys()
            if not torch.allclose(tensors[name].double(), others[name].double(), rtol=0, atol=tolerance)
        ]
    was, new = metrics(before), metrics(now)
    if was.keys() != new.keys():
        wrong.append(f"iterations {sorted(was)} and {sorted(new)}")
    only: set[str] = set()
    for step in was.keys() & new.keys():
        only |= was[step].keys() ^ new[step].keys()
        for name in was[step].keys() & new[step].keys():
            one, other = was[step][name], new[step][name]
            same = one == other
            if tolerance and isinstance(one, float) and isinstance(other, float):
                same = abs(one - other) <= tolerance * max(1.0, abs(one))
            if not same:
                wrong.append(f"{step}: {name} {one} -> {other}")
    return wrong + ([f"(in one alone: {', '.join(sorted(only))})"] if only else [])


def main() -> None:
    """Run the cases and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", default=[*CASES])
    parser.add_argument("--kill", action="store_true")
    chosen = parser.parse_args()
    made = checkpoints(chosen.out.resolve())
    for case in chosen.cases or [*CASES]:
        before, now = chosen.out.resolve() / "before" / case, chosen.out.resolve() / "now" / case
        if not (before / "policy").is_dir():
            run(chosen.before, case, before, made)
        subprocess.run(["rm", "-rf", str(now), str(now.with_suffix(".log"))], check=True)
        began = time.perf_counter()
        run(HERE, case, now, made, chosen.kill)
        tolerance = 1e-6 if CASES[case][0] > 1 else 0.0
        found = compare(before, now, tolerance)
        bad = [each for each in found if not each.startswith("(")]
        print(f"{case:<12} {'differs' if bad else 'equal'} in {time.perf_counter() - began:.0f} s", flush=True)
        for each in found[:12]:
            print(f"    {each}", flush=True)


if __name__ == "__main__":
    main()
