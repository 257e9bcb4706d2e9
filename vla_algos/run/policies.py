"""The policy of a recipe: made as its settings say, divided among the processes, and written with what it learnt on."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra.core.hydra_config import HydraConfig

from vla_algos import distributed
from vla_algos.run.environments import check_share
from vla_algos.run.folder import settle_auto
from vla_algos.run.run import Run
from vla_algos.run.sharding import Sharding, check_same_draws, say_host_memory
from vla_algos.run.training_env import differences, is_chosen, load_training_env, save_training_env
from vla_common.experiments import as_typed
from vla_envs import SimulatorSpec
from vla_policies import VLAPolicy, make_policy
from vla_policies.checkpoint.hub import resolve
from vla_policies.memory import MemoryPlan


def make_run_policy(
    run: Run, spec: SimulatorSpec, env: Mapping[str, Any], sharding: Sharding | None = None, offload: bool = False
) -> VLAPolicy:
    """Make the policy of ``config.policy``, divided among the processes as ``sharding`` says; ``None`` for not at all.

    It is complete and known to fit the environment, which is not started. What a machine chose for a setting ``auto``
    is printed, and noted in ``config``; a resumed run keeps it. ``offload``: the optimizer's moments will be in host
    memory. ValueError: its chunks do not fit the environment, which this process starts with the settings ``env``, or
    there is no memory for it. RuntimeError: the processes have drawn different weights.
    """
    config = run.config
    settle_auto(config, run.folder)
    settings = dict(config.policy)
    divide = None if sharding is None else sharding.divider(settings.get("device"))
    plan = MemoryPlan() if sharding is None else sharding.memory_plan(offload)

    def complete(policy: VLAPolicy) -> None:
        say_host_memory(policy, plan)
        if divide is not None:
            divide(policy)

    policy = make_policy(spec, shard=None if divide is None else complete, **settings)
    if divide is None:
        complete(policy)
    check_same_draws()
    for name in [name for name, value in settings.items() if value == "auto"]:
        config.policy[name] = became = getattr(policy.config, name)
        print(f"policy.{name}=auto: {became} on this machine")
    check_share(env, policy)
    total = sum(parameter.numel() for parameter in policy.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    if config.recipe != "evaluate" and not total:
        raise ValueError(f"policy={policy.family} has no weights here to learn with; type vla-recipe run evaluate")
    said = f"policy of {total:,} parameters" if total else "policy without weights here"
    said += f", {trained:,} of them trained" if trained < total else ""
    print("; ".join(filter(None, [said, "" if sharding is None else sharding.describe(offload)])))
    if policy.chunk_size > (steps := spec.max_episode_steps):
        print(f"warning: a chunk has {policy.chunk_size} actions, an episode {steps}: one decision, cut short")
    run.differs = _training_differences(config, policy, spec)
    return policy


def _training_differences(
    config: SimpleNamespace, policy: VLAPolicy, spec: SimulatorSpec
) -> dict[str, tuple[Any, Any]]:
    """List, and say, what a policy of a checkpoint sees otherwise than in its training: ``{setting: (then, now)}``."""
    checkpoint = config.policy.get("checkpoint")
    unsaid = HydraConfig.initialized() and not is_chosen(HydraConfig.get().overrides.task)  # a job does not know it
    if not checkpoint:
        if config.policy.get("url") and unsaid:
            raise ValueError("a server does not say where its policy acts; type env=NAME or experiment=NAME too")
        return {}
    trained, differs = load_training_env(resolve(checkpoint)), {}
    if trained is not None:
        differs = {f"env.{name}": each for name, each in differences(trained["env"], config.env).items()}
        if trained.get("chunk_size", policy.chunk_size) != policy.chunk_size:
            differs["actions per decision"] = (trained["chunk_size"], policy.chunk_size)
    if trained is None and config.recipe == "evaluate" and unsaid:
        print(
            f"warning: {checkpoint} does not say what it was trained on, {spec.id} is taken; type env=NAME or "
            "experiment=NAME"
        )
    if differs:
        shown = "; ".join(f"{name}={as_typed(now)}, not {as_typed(then)}" for name, (then, now) in differs.items())
        print(f"warning: {checkpoint} was trained otherwise: {shown}")
    return differs


def policy_writer(
    config: SimpleNamespace, policy: VLAPolicy, spec: SimulatorSpec, evaluated_on: SimulatorSpec
) -> Callable[[Path], None]:
    """Return what writes a policy's own files into a folder, and what it was trained on; all processes together."""

    def write(folder: Path) -> None:
        policy.save_pretrained(folder)
        if distributed.is_main():
            save_training_env(folder, config.recipe, config.env, spec, policy.chunk_size, config.eval, evaluated_on.id)

    return write
