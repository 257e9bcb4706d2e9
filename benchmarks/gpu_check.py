"""Does a GPU compute here what the CPU does? Parts in processes of their own, a table and one JSON: ``make gpu-check``.

A row is a number, and the most that it may be where there is such a limit; a row above its limit is WRONG, a part that
does not come to its end is FAILED, and either ends the program with 1. What a machine lacks is skipped with its reason.
The checkpoints are random; nothing is downloaded.

    python benchmarks/gpu_check.py --output gpu.json
    python benchmarks/gpu_check.py --parts golden,card --card 24      # on a card of 24 GB, or as if it were one
    python benchmarks/gpu_check.py --tiny                             # the same code on a CPU, in toy sizes
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FAMILIES = {  # tiny checkpoints, and the settings that tell of how they are used
    "openvla": {"benchmark": "maniskill", "unnorm_key": "tiny"},
    "openvla_oft_rlinf": {"benchmark": "libero", "unnorm_key": "tiny", "layout": "rlinf"},
    "pi0": {"benchmark": "libero", "config_name": "pi0_libero", "norm_stats_id": "tiny", "num_steps": 3},
    "pi05": {"benchmark": "libero", "config_name": "pi05_libero", "norm_stats_id": "tiny", "num_steps": 3},
    "smolvla": {"benchmark": "libero", "num_steps": 3},
}
MARK = "ROWS "
Row = tuple[str, float | str, float | None]  # what, how much, at most


def timed(function: Callable[[], Any], options: argparse.Namespace) -> float:
    """Median milliseconds until the GPU has done its work."""
    import torch

    found = []
    for repetition in range(3 if options.tiny else 8):
        began = time.perf_counter()
        function()
        if options.device == "cuda":
            torch.cuda.synchronize()
        if repetition:
            found.append(1e3 * (time.perf_counter() - began))
    return statistics.median(found)


def tiny_policy(kind: str, folder: Path, device: str, **settings: Any) -> Any:
    from vla_policies import OpenVLA, OpenVLAOFT, Pi0, SmolVLA
    from vla_policies.tiny import make_tiny

    if not (folder / kind).exists():
        make_tiny(kind, folder / kind)
    made = {"openvla": OpenVLA, "openvla_oft_rlinf": OpenVLAOFT, "smolvla": SmolVLA}.get(kind, Pi0)
    return made.from_pretrained(folder / kind, device=device, value_head=True, **FAMILIES[kind], **settings)


def rollout_of(policy: Any, decisions: int) -> Any:
    """A batch ``[decisions]`` as a rollout leaves it, in host memory, with made-up advantages."""
    import torch
    from tensordict import TensorDict

    from vla_common import keys
    from vla_policies import make_example

    with torch.no_grad():
        acted = policy(make_example(policy.adapter.benchmark, decisions))
    kept = [*policy.loss_keys, keys.ACTION_LOG_PROB, keys.STATE_VALUE]
    batch = TensorDict({key: acted.get(key) for key in kept}, [decisions]).to("cpu")
    batch[keys.ADVANTAGE] = torch.randn(decisions, 1, generator=torch.Generator().manual_seed(3))
    batch[keys.VALUE_TARGET] = torch.zeros_like(batch[keys.STATE_VALUE])
    batch[keys.NEXT] = TensorDict(
        {keys.STEP_MASK: torch.ones(decisions, policy.chunk_size, dtype=torch.bool)}, [decisions]
    )
    return batch


# ---- parts


def machine(options: argparse.Namespace) -> Iterator[Row]:
    """What there is: versions, and the rates that others are shares of."""
    import torch

    size, memory = (256, 1 << 20) if options.tiny else (8192, 1 << 30)
    yield "torch", torch.__version__, None
    if options.device == "cuda":
        yield "GPU", torch.cuda.get_device_name(), None
        yield "memory, GB", torch.cuda.mem_get_info()[1] / 1e9, None
    left, right = (torch.randn(size, size, device=options.device, dtype=torch.bfloat16) for _ in range(2))
    yield "product of bfloat16 matrices, TFLOP/s", 2 * size**3 / timed(lambda: left @ right, options) / 1e9, None
    source, target = (torch.empty(memory, device=options.device, dtype=torch.uint8) for _ in range(2))
    yield "copy within memory, TB/s", 2 * memory / timed(lambda: target.copy_(source), options) / 1e9, None


def golden(options: argparse.Namespace) -> Iterator[Row]:
    """Every family against the CPU in float32, whose numbers the tests hold to the references; and images."""
    import torch

    from vla_common import keys
    from vla_policies.nn.blocks import blocks_of
    from vla_policies.processing.images import ImagePreprocessor

    frames = torch.randint(0, 256, (2, 1, 256, 320, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for method in ("bicubic", "lanczos3"):
        resize = ImagePreprocessor(resize_method=method).resize
        apart = (resize(frames).int() - resize(frames.to(options.device)).cpu().int()).abs().max()
        yield f"images, {method}: levels apart", int(apart), 0
    folder = Path(tempfile.mkdtemp())
    for kind in FAMILIES:
        torch.manual_seed(0)
        reference = tiny_policy(kind, folder, "cpu")
        batch = rollout_of(reference, 2)
        with torch.no_grad():
            expected = reference.evaluate_actions(batch)
        rounding = 2.0**-8 * len(list(blocks_of(reference))) ** 0.5  # of bfloat16, which blocks add up at random
        for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, rounding)):
            policy = tiny_policy(kind, folder, options.device, dtype=dtype)
            policy.load_state_dict(reference.state_dict())  # with the same value head
            with torch.no_grad():
                found = policy.evaluate_actions(batch.to(options.device))
            name = f"{kind}, {str(dtype).removeprefix('torch.')}"
            for what, here, there in zip(("log-probability", "entropy", "value"), found, expected, strict=True):
                yield f"{name}: {what} apart", float((here.cpu() - there).abs().mean()), most
            own = rollout_of(policy, 4)
            with torch.no_grad():
                again = policy.evaluate_actions(own.to(options.device))[0].cpu()
            difference = (again - own[keys.ACTION_LOG_PROB]).abs().mean()
            yield f"{name}: rollout and update apart, nats", float(difference), 1e-5 if dtype == torch.float32 else most


def resume(options: argparse.Namespace) -> Iterator[Row]:
    """Four updates, the same again, and two with a saved state and two more; also with LoRA in bfloat16."""
    import torch

    from vla_algos import ChunkClipPPOLoss, Learner
    from vla_algos.run.seeds import random_state, set_random_state
    from vla_policies.checkpoint.lora import add_lora

    folder = Path(tempfile.mkdtemp())

    def begin(kind: str, lora: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        policy = tiny_policy(kind, folder, options.device, **({"dtype": torch.bfloat16} if lora else {}))
        if lora:
            add_lora(policy, 4)
        return policy, Learner(ChunkClipPPOLoss(policy, entropy_coeff=0.01), lr=1e-3, minibatch_size=4, epochs=2)

    def learn(policy: Any, learner: Any, updates: int) -> dict[str, Any]:
        for _ in range(updates):
            learner.update(rollout_of(policy, 8))
        return {name: parameter.detach().cpu().clone() for name, parameter in policy.named_parameters()}

    for kind, lora in (("openvla_oft_rlinf", False), ("pi0", False), ("openvla_oft_rlinf", True), ("pi0", True)):
        first, second = (learn(*begin(kind, lora), 4) for _ in range(2))
        policy, learner = begin(kind, lora)
        learn(policy, learner, 2)
        torch.save([policy.state_dict(), learner.state_dict(), random_state()], folder / "state")
        policy, learner = begin(kind, lora)
        weights, state, numbers = torch.load(folder / "state", map_location="cpu", weights_only=True)
        policy.load_state_dict(weights)
        learner.load_state_dict(state)
        set_random_state(numbers)
        third = learn(policy, learner, 2)
        for what, other in (("repeated", second), ("resumed", third)):
            apart = max(float((first[name] - tensor).abs().max()) for name, tensor in other.items())
            yield f"{kind}{', LoRA on bfloat16' if lora else ''}: {what}, weights apart", apart, None if lora else 0


def sharding(options: argparse.Namespace) -> Iterator[Row]:
    """One shard, as it is, in bfloat16, and with its weights in host memory: the loss of the first update."""
    import torch

    from vla_algos import ChunkClipPPOLoss, Learner, distributed
    from vla_policies.sharding import shard

    folder, half = Path(tempfile.mkdtemp()), torch.bfloat16
    with distributed.process_group():
        for kind in ("openvla_oft_rlinf", "pi0"):
            plain = tiny_policy(kind, folder, options.device)
            rollout, weights, losses = rollout_of(plain, 8), {**plain.state_dict()}, []
            ways: list[dict[str, Any]] = [{}, {"compute": half}, {"compute": half, "cpu_offload": True}]
            for way, settings in enumerate([None, *ways]):
                policy = tiny_policy(kind, folder, options.device)
                policy.load_state_dict(weights)
                if settings is not None:
                    shard(policy, distributed.device_mesh(1, options.device), **settings)
                learner = Learner(
                    ChunkClipPPOLoss(policy), lr=1e-3, minibatch_size=4, micro_batch_size=2, max_log_ratio=None
                )
                torch.manual_seed(1)
                losses.append(learner.update(rollout.clone())["train/loss"])
                name = ("not sharded", "one shard", "bfloat16", "bfloat16, host memory")[way]
                yield f"{kind}, {name}: loss apart", abs(losses[-1] - losses[0]), 0.01 if way > 1 else 1e-6


def card(options: argparse.Namespace) -> Iterator[Row]:
    """The real sizes on a card of ``--card`` GB: milliseconds, and memory against what ``memory`` calculates."""
    import torch

    from vla_algos import ChunkClipPPOLoss, Learner
    from vla_policies import make_example
    from vla_policies.memory import GB, MemoryPlan, PolicyMemory

    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.card * GB / torch.cuda.mem_get_info()[1]))
    acting, learning = (2, 2) if options.tiny else (16, 8)
    for name, make in {"OpenVLA-OFT 7B, LoRA": openvla_oft, "pi0 3.3B, LoRA": pi0}.items():
        policy = make(options)
        calculated = PolicyMemory(policy).gigabytes(MemoryPlan(), decisions=learning, num_envs=acting)
        loss = ChunkClipPPOLoss(policy)
        learner = Learner(loss, lr=1e-5, minibatch_size=2 * learning, micro_batch_size=learning, max_log_ratio=None)
        rollout = rollout_of(policy, 2 * learning)
        observations = make_example(policy.adapter.benchmark, acting)
        update = partial(lambda learner, rollout: learner.update(rollout.clone()), learner, rollout)
        act = partial(lambda policy, observations: policy(observations.clone()), policy, observations)
        parts = {f"an update of {2 * learning} decisions": update, f"a decision of {acting} environments": act}
        for (what, work), said in zip(parts.items(), calculated, strict=True):
            work()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            yield f"{name}: {what}, ms", timed(work, options), None
            if cuda:
                most = torch.cuda.max_memory_allocated() / GB
                yield f"{name}: {what}, GB", most, options.card
                yield f"{name}: {what}, share that memory misses", abs(said / most - 1), 0.1
        del policy, loss, learner, update, act, parts, work


def openvla_oft(options: argparse.Namespace) -> Any:
    import policies
    import torch

    size, rank = ("tiny", 4) if options.tiny else ("7b", 32)
    return policies.make_policy(size, options.device, torch.bfloat16, rank, True)


def pi0(options: argparse.Namespace) -> Any:
    import flow
    import torch

    size, rank = ("tiny", 4) if options.tiny else ("published", 32)
    return flow.make_policy(size, 4, False, options.device, dtype=torch.bfloat16, lora=rank, checkpointing=True)


def egl(options: argparse.Namespace) -> Iterator[Row]:
    """Meta-World's frames, drawn on the GPU."""
    import torch

    from vla_envs import make_env

    if find_spec("metaworld") is None:
        yield "skipped", "metaworld is not installed", None
        return
    for workers in (1, 2) if options.tiny else (1, 8, 16):
        env = make_env(
            "metaworld/button-press-topdown-v3", num_envs=max(workers, 2), num_workers=workers, image_size=224
        )
        try:
            observed, decisions = env.reset(), 3 if options.tiny else 30
            began = time.perf_counter()
            for _ in range(decisions):
                observed["action"] = torch.zeros(env.num_envs, env.chunk_size, 4)
                _, observed = env.step_and_maybe_reset(observed)
            yield f"{workers} workers, frames/s", decisions * env.num_envs / (time.perf_counter() - began), None
        finally:
            env.close()


def maniskill(options: argparse.Namespace) -> Iterator[Row]:
    """Plate-25 with all worlds on the GPU, beside the same episodes in processes."""
    import torch

    from vla_envs import make_env

    if options.device != "cuda" or find_spec("mani_skill") is None:
        yield "skipped", "needs CUDA, mani_skill and its assets", None
        return
    seen = []
    for where in ({"num_workers": 2}, {"backend": "cuda"}):
        env = make_env("maniskill/PutOnPlateInScene25Main-v3", num_envs=2, seed=0, chunk_size=1, **where)
        seen.append(env.reset().select("images", "states").cpu())
        env.close()
    yield "first states apart", float((seen[0]["states"] - seen[1]["states"]).abs().max()), 1e-3
    apart = (seen[0]["images"].int() - seen[1]["images"].int()).abs().float().mean()
    yield "first images, mean levels apart", float(apart), None
    env = make_env("maniskill/PutOnPlateInScene25Main-v3", num_envs=128, backend="cuda", seed=0, chunk_size=5)
    observed, began = env.reset(), time.perf_counter()
    for _ in range(10):
        observed["action"] = torch.zeros(128, 5, 7, device=env.device)
        _, observed = env.step_and_maybe_reset(observed)
    torch.cuda.synchronize()
    yield "128 worlds, steps/s", 10 * 5 * 128 / (time.perf_counter() - began), None
    env.close()


def nccl(options: argparse.Namespace) -> Iterator[Row]:
    """All GPUs of this machine add up a number."""
    import torch

    processes = torch.cuda.device_count() if options.device == "cuda" else 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    found = subprocess.run([*command, __file__, "--part", "add"], capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(found.stderr.strip()[-500:])
    yield f"{processes} processes: sum apart", abs(float(found.stdout.split()[-1]) - processes), 0


def add() -> None:
    import torch
    import torch.distributed as dist

    from vla_algos import distributed

    with distributed.process_group():
        number = torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu")
        dist.all_reduce(number)
        if distributed.is_main():
            print(float(number))


PARTS = {part.__name__: part for part in (machine, golden, resume, sharding, card, egl, maniskill, nccl)}


# ---- running them


def run_part(part: str, options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a part in a process of its own, which is ended with its children when its time is over."""
    began = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, *arguments, "--part", part]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile("w+") as output:
        environment["TMPDIR"] = folder  # its checkpoints go with it
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status: int | str = process.wait(options.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = f"no end within {options.limit} s"
        output.seek(0)
        lines = output.read().splitlines()
    rows = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    result: dict[str, Any] = {"rows": rows, "seconds": round(time.perf_counter() - began, 1)}
    return result if status == 0 else {**result, "failed": [str(status), *lines[-12:]]}


def show(part: str, result: dict[str, Any]) -> bool:
    """Print the rows of a part; tells whether all are right."""
    print(f"\n{part}  ({result['seconds']:.0f} s)")
    right = True
    for what, value, most in result["rows"]:
        wrong = most is not None and not value <= most  # nan is wrong
        right &= not wrong
        number = f"{value:.4g}" if isinstance(value, (int, float)) else value
        print(f"  {what:<68}{number:>12}{'' if most is None else f'  at most {most:.2g}'}{'  WRONG' * wrong}")
    for line in result.get("failed", ()):
        print(f"  FAILED  {line}")
    return right and "failed" not in result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, with commas between")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, in toy sizes")
    parser.add_argument("--card", type=float, default=24, help="GB that the part card may use")
    parser.add_argument("--limit", type=float, default=600, help="seconds of each part")
    parser.add_argument("--output", type=Path, help="write all rows as JSON")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.device = "cpu" if options.tiny else "cuda"
    if options.part == "add":
        add()
        return 0
    if options.part:
        for row in PARTS[options.part](options):
            print(MARK + json.dumps(row), flush=True)
        return 0
    from torch.cuda import is_available

    if unknown := set(options.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.device == "cuda" and not is_available():
        parser.error("torch sees no GPU here: type --tiny (make gpu-check TINY=1) for toy sizes on the CPU")
    arguments = ["--card", str(options.card), *["--tiny"] * options.tiny]
    results, right = {}, True
    for part in options.parts.split(","):
        results[part] = run_part(part, options, arguments)
        right &= show(part, results[part])
        if options.output:
            options.output.write_text(json.dumps(results, indent=1) + "\n")
    print("\nall right" if right else "\nsome are wrong, see above")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
