"""``python -m vla_policies inspect | memory | tiny``: what a checkpoint is and lacks, how large a GPU a policy needs.

``tiny`` writes a checkpoint with random weights, to try commands with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vla_common.program import OneLineParser, report, run_main

_SETTING = "policy."  # what settings of a policy begin with, wherever they stand between the options


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says.

    Returns:
        0; 1 if an inspected checkpoint cannot be loaded, because something is missing; 2 if it is none.
    """
    parser = OneLineParser(prog="python -m vla_policies", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("inspect", help="family, head, layout, statistics, chunk, size, what is missing")
    command.add_argument("folder", help="checkpoint folder or hub id, such as openvla/openvla-7b")
    _add_memory(
        commands.add_parser("memory", help="GB per GPU in update and rollout, calculated, by how it is trained")
    )
    _add_tiny(commands.add_parser("tiny", help="write a tiny checkpoint with random weights, to try commands with"))
    words = list(sys.argv[1:] if arguments is None else arguments)
    settings = [word for word in words if word.startswith(_SETTING)]
    chosen = parser.parse_args([word for word in words if not word.startswith(_SETTING)])
    try:
        if chosen.command == "memory":
            return _print_memory(chosen, settings)
        if settings:
            raise ValueError(f"{settings[0]}: {chosen.command} takes a folder and no settings")
        if chosen.command == "tiny":
            return _write_tiny(chosen)
        from vla_policies.registry import inspect_policy

        found = inspect_policy(chosen.folder)
    except (OSError, ValueError, ImportError) as error:
        return report(error)
    print(found)
    return 1 if found.missing else 0


def _add_memory(command: argparse.ArgumentParser) -> None:
    command.add_argument("policy", help="checkpoint folder or hub id (headers are read), or a family (published sizes)")
    command.add_argument(
        "settings", nargs="?", metavar="policy.NAME=VALUE ...", help="as recipes take them, such as policy.lora_rank=32"
    )
    command.add_argument("--gpus", type=int, default=1, help="of the run; a process each")
    command.add_argument("--shards", type=int, help="that the model is cut into; --gpus unless given")
    command.add_argument("--gpu-memory", type=float, default=80.0, metavar="GB", help="of a GPU: what fits")
    command.add_argument("--micro-batch-size", type=int, default=1, help="decisions of a backward pass")
    command.add_argument("--num-envs", type=int, default=1, help="of a process, that decide together")


def _add_tiny(command: argparse.ArgumentParser) -> None:
    command.add_argument("kind", help="openvla, openvla_oft_official, openvla_oft_rlinf, pi0 or pi05")
    command.add_argument("--to", required=True, metavar="NEW", help="a folder that is not there yet")
    command.add_argument(
        "--statistics", default="tiny", metavar="NAME", help="of their data set, such as bridge_orig for plate-25"
    )


def _write_tiny(chosen: argparse.Namespace) -> int:
    from vla_policies.tiny import make_tiny

    folder = make_tiny(chosen.kind, chosen.to, chosen.statistics)
    print(f"{folder}: a tiny {chosen.kind} with random weights, to try commands with; it solves nothing")
    return 0


def _print_memory(chosen: argparse.Namespace, settings: Sequence[str]) -> int:
    from vla_policies.sizing import check_gpus, describe, read_settings

    typed = read_settings([*([chosen.settings] if chosen.settings else []), *settings])
    numbers = {"decisions": chosen.micro_batch_size, "num_envs": chosen.num_envs, "gpu_memory": chosen.gpu_memory}
    shards = check_gpus(chosen.gpus, chosen.shards, **numbers)
    from vla_policies.registry import outline_policy

    print(describe(outline_policy(chosen.policy, **typed), gpus=chosen.gpus, shards=shards, **numbers))
    return 0


if __name__ == "__main__":
    run_main(main)
