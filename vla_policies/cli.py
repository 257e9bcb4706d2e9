"""``python -m vla_policies inspect | memory | tiny``: what a checkpoint is and lacks, how large a GPU a policy needs.

``tiny`` writes a checkpoint with random weights, to try commands with.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vla_common.program import OneLineParser, printable, report

_SETTING = "policy."  # what settings of a policy begin with, wherever they stand between the options


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0; 1 if an inspected checkpoint cannot be loaded, because something is missing; 2 if it is none."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    settings = [word for word in words if word.startswith(_SETTING)]
    chosen = _parser().parse_args([word for word in words if not word.startswith(_SETTING)])
    try:
        if settings and chosen.command != "memory":
            raise ValueError(f"{settings[0]}: {chosen.command} takes a folder and no settings")
        return {"inspect": _inspect, "tiny": _write_tiny, "memory": _print_memory}[chosen.command](chosen, settings)
    except (OSError, ValueError, ImportError) as error:
        return report(error)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m vla_policies", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="family, head, layout, statistics, chunk, size, what is missing")
    inspect.add_argument("folder", help="of a checkpoint or a run, or hf:NAME of the hub")
    memory = commands.add_parser("memory", help="GB per GPU in update and rollout, calculated, by how it is trained")
    memory.add_argument("policy", help="folder or hf:NAME (headers are read), or a family (published sizes)")
    memory.add_argument(
        "settings", nargs="?", metavar="policy.NAME=VALUE ...", help="as recipes take them, such as policy.lora_rank=32"
    )
    memory.add_argument("--gpus", type=int, default=1, help="of the run; a process each")
    memory.add_argument("--shards", type=int, help="that the model is cut into; --gpus unless given")
    memory.add_argument("--gpu", default="80gb", help="what a GPU has, such as 24gb: what fits")
    memory.add_argument("--micro-batch-size", type=int, default=1, help="decisions of a backward pass")
    memory.add_argument("--num-envs", type=int, default=1, help="of a process, that decide together")
    tiny = commands.add_parser("tiny", help="write a tiny checkpoint with random weights, to try commands with")
    tiny.add_argument("kind", help="such as openvla; one that there is not lists them")
    tiny.add_argument("--to", required=True, metavar="NEW", help="a folder that is not there yet")
    tiny.add_argument("--statistics", default="tiny", metavar="NAME", help="of their data set; LeRobot's have none")
    return parser


def _inspect(chosen: argparse.Namespace, _: Sequence[str]) -> int:
    from vla_policies.registry import inspect_policy

    found = inspect_policy(policy_of(chosen.folder))
    print(printable(str(found)))
    return 1 if found.missing else 0


def _write_tiny(chosen: argparse.Namespace, _: Sequence[str]) -> int:
    from vla_policies.tiny import make_tiny

    folder = make_tiny(chosen.kind, chosen.to, chosen.statistics)
    print(f"{folder}: a tiny {chosen.kind} with random weights, to try commands with; it solves nothing")
    return 0


def _print_memory(chosen: argparse.Namespace, settings: Sequence[str]) -> int:
    shards = chosen.gpus if chosen.shards is None else chosen.shards
    for option in ("gpus", "shards", "micro_batch_size", "num_envs"):
        if (number := shards if option == "shards" else getattr(chosen, option)) < 1:
            raise ValueError(f"--{option.replace('_', '-')} {number}: must be at least 1")
    if chosen.gpus % shards:
        raise ValueError(f"--shards {shards}: must divide --gpus {chosen.gpus}")
    typed = read_settings(([chosen.settings] if chosen.settings else []) + [*settings])
    from vla_policies.memory import describe_memory, usable
    from vla_policies.registry import meta_policy

    numbers = {"decisions": chosen.micro_batch_size, "num_envs": chosen.num_envs, "gpu_memory": usable(chosen.gpu)}
    print(describe_memory(meta_policy(policy_of(chosen.policy), **typed), shards=shards, **numbers))
    return 0


def policy_of(folder: str) -> str:
    """Return the policy's folder of a run's; other names as they are."""
    inside = Path(folder, "policy")
    return str(inside) if inside.is_dir() else folder


def read_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Read each ``policy.NAME=VALUE`` as recipes take them: ``null`` leaves one to the checkpoint."""
    return {name: value for name, value in map(_read_setting, texts) if value is not None}


def _read_setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if not name.startswith(_SETTING) or not value:
        raise ValueError(f"{text!r} is no setting of a policy; type it as recipes take it: policy.lora_rank=32")
    try:
        return name.removeprefix(_SETTING), json.loads(value)
    except ValueError:
        return name.removeprefix(_SETTING), value
