"""``gpu=24gb``: settings with which a run fits its GPUs, calculated before it begins."""

import os
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from vla_common.experiments import as_typed
from vla_policies import PretrainedPolicy, VLAPolicy
from vla_policies.memory import GB, MemoryPlan, PolicyMemory, calculate, usable
from vla_policies.registry import get_policy_class, meta_policy

CARDS = ("12gb", "16gb", "24gb", "48gb", "80gb")
Changes = dict[str, Any]  # settings, by their names as they are typed
_ADAPTERS: Changes = {"policy.lora_rank": 32, "policy.dtype": "bfloat16", "sharding.compute": None}
_ADAPTERS_RATE = 1e-4  # RLinf's


def fit_gpu(settings: SimpleNamespace, processes: int, typed: Collection[str]) -> Changes:
    """Return settings with which a run fits GPUs of the size ``settings.gpu``, and print what they change.

    Parts of a minibatch, gradient checkpointing, prefixes that are not kept, Adam in host memory and stages leave the
    updates as they are, up to rounding (stages draw other random numbers). Where that is not enough an adapter in
    bfloat16 is trained. ``settings`` are those of the run, of so many ``processes``, each with a GPU; those that are
    ``typed``, by name, are not changed. ValueError: it does not fit; says which GPU would do.
    """
    name = getattr(settings, "gpu", None)  # recipes that clone or evaluate have none
    if name is None:
        return {}
    name = str(name)
    if any(each != "all" for role, each in getattr(settings, "placement", {}).items() if role != "env"):
        raise ValueError(f"gpu={name}: is for processes that both act and learn; leave out gpu, or placement")
    if name == "auto":
        if settings.launcher["name"] == "slurm":
            raise ValueError("gpu=auto: which GPU the job will have is not known here; type its size, such as gpu=80gb")
        if not torch.cuda.is_available():
            raise ValueError("gpu=auto: torch sees no GPU here; type the size of one, such as gpu=24gb")
        name = f"{round(torch.cuda.get_device_properties(0).total_memory / 2**30)}gb"
    limit, family, first = usable(name), settings.policy["family"], os.environ.get("RANK", "0") == "0"  # of torchrun
    if not get_policy_class(family).needs_checkpoint:
        if first:
            print(f"gpu={name}: {family} is made new and small, nothing is changed")
        return {"gpu": name}
    fitting = Fitting(settings, processes, typed)
    changes = fitting.changes(limit)
    if changes is None:
        would = next((each for each in CARDS if fitting.changes(usable(each)) is not None), None)
        raise ValueError(
            f"gpu={name}: {family} does not fit, a decision at a time and with all that saves memory; "
            + (f"the smallest that would do is gpu={would}" if would else "take more GPUs, or larger ones")
        )
    if first:
        print(fitting.describe(name, changes))
    return {"gpu": name, **changes}


class Fitting:
    """What makes a run fit; arguments as of :func:`fit_gpu`."""

    def __init__(self, settings: SimpleNamespace, processes: int, typed: Collection[str]):
        self.settings, self.processes, self.typed = settings, processes, {*typed}
        self.as_it_is = Load(settings, processes, {})

    @cached_property
    def adapted(self) -> "Load | None":
        """The run with an adapter in bfloat16; ``None`` where it trains one already, or cannot."""
        policy = self.settings.policy
        own = issubclass(get_policy_class(policy["family"]), PretrainedPolicy)
        if not own or self.typed & _ADAPTERS.keys() or policy.get("lora_adapter") or policy.get("dtype"):
            return None
        rank = policy.get("lora_rank")
        changes = _ADAPTERS if rank is None else {**_ADAPTERS, "policy.lora_rank": rank}
        rate = {} if rank or "optim.lr" in self.typed else {"optim.lr": _ADAPTERS_RATE}
        return Load(self.settings, self.processes, {**changes, **rate})

    def changes(self, limit: float) -> Changes | None:
        """Return what makes it fit into ``limit`` GB; ``None`` if nothing does."""
        found = self.as_it_is.fit(limit, self.typed)
        return self.adapted.fit(limit, self.typed) if found is None and self.adapted else found

    def load(self, changes: Changes) -> "Load":
        """Return that of which they are the changes."""
        return self.adapted if "policy.dtype" in changes and self.adapted else self.as_it_is

    def describe(self, name: str, changes: Changes) -> str:
        """Say what becomes of the run, and whether it is another one."""
        before, load = self.as_it_is, self.load(changes)
        lines = [f"gpu={name}: {usable(name):.1f} GB of it are counted on, the rest is for what is not calculated"]
        for what, was, becomes in zip(("update", "rollout"), before.peaks({}), load.peaks(changes), strict=True):
            lines.append(f"  {f'GB in the {what}':<31}{was:.1f} -> {becomes:.1f}")
        for setting, value in changes.items():
            if value != (was := before.read(setting, {})):
                lines.append(f"  {setting:<31}{as_typed(was)} -> {as_typed(value)}")
        if load is before:
            others = " and the random numbers" * ("pipeline.stages" in changes)
            return "\n".join([*lines, f"the updates are the same, but for the rounding{others} of other batches"])
        lines.append("this is another experiment: an adapter is trained, in bfloat16")
        moved = {setting: value for setting, value in changes.items() if setting not in load.others}
        moved["sharding.cpu_offload"] = True
        if max(before.peaks(moved)) <= usable(name):
            host = calculate(before.memory.groups, before.plan(moved)).host / GB
            lines.append(f"the same updates are had by sharding.cpu_offload=true, with {host:.0f} GB of host memory")
        return "\n".join(lines)


class Load:
    """What a run takes of each GPU; ``others`` are settings that are changed in any case."""

    def __init__(self, settings: SimpleNamespace, processes: int, others: Changes):
        self.settings, self.processes, self.others = settings, processes, others
        policy = {name: self.read(f"policy.{name}", {}) for name in settings.policy.keys() | {"lora_rank", "dtype"}}
        family, checkpoint = policy["family"], policy.pop("checkpoint", None)
        if not checkpoint:
            del policy["family"]
        self.policy: VLAPolicy = meta_policy(checkpoint or family, **policy)
        self.memory = PolicyMemory(self.policy)
        self.keeps_prefix = getattr(self.policy, "prefix_is_frozen", False) and self.policy.config.prefix_cache_gb > 0

    def read(self, name: str, changes: Mapping[str, Any]) -> Any:
        """Return a setting as it will be."""
        section, setting = name.split(".")
        changes = {**self.others, **changes}
        return changes[name] if name in changes else getattr(self.settings, section).get(setting)

    @property
    def decisions(self) -> int:
        """How many decisions a backward pass of a process has."""
        update = self.settings.update
        whole = update["minibatch_size"] or self.settings.env["num_envs"] * self.settings.collector.get("decisions", 64)
        return update["micro_batch_size"] or -(-whole // (self.processes * (update["minibatches"] or 1)))

    def plan(self, changes: Mapping[str, Any]) -> MemoryPlan:
        """Say where weights, gradients and Adam are."""
        shards, compute = self.settings.sharding["shards"], self.read("sharding.compute", changes)
        places = (self.read(name, changes) for name in ("offload.optimizer", "sharding.cpu_offload"))
        return MemoryPlan(self.processes if shards == "all" else shards, compute is not None, *places)

    def peaks(self, changes: Mapping[str, Any]) -> tuple[float, float]:
        """Return GB of a GPU in an update and in a rollout."""
        plan, checkpointing = self.plan(changes), getattr(self.policy.config, "gradient_checkpointing", False)
        envs = max(self.settings.env["num_envs"], (self.settings.eval.get("env") or {}).get("num_envs") or 0)
        update, rollout = self.memory.gigabytes(
            plan,
            checkpointing=changes.get("policy.gradient_checkpointing", checkpointing),
            decisions=changes.get("update.micro_batch_size", self.decisions),
            keeps="policy.prefix_cache_gb" not in changes,
            num_envs=-(-envs // (self.processes * self.read("pipeline.stages", changes))),
        )
        frozen = 0.0  # copy of what is trained
        if self.settings.loss["reference_kl_coeff"]:
            frozen = calculate(self.memory.groups, plan).gradients / GB
        return update + frozen, rollout + frozen

    def updates(self) -> Iterator[Changes]:
        """Yield what leaves an update as it is, the quickest first."""
        parts = [{"update.micro_batch_size": part} for part in (64, 32, 16, 8, 4, 2, 1) if part < self.decisions]
        quick = [{}, *(part for part in parts if part["update.micro_batch_size"] >= 8)]
        ways: list[Changes] = [{}]
        if getattr(self.policy.config, "gradient_checkpointing", True) is False:
            ways.append({"policy.gradient_checkpointing": True})
        if self.keeps_prefix:
            ways += [{**way, "policy.prefix_cache_gb": 0.0} for way in ways]
        yield from (way | part for way in ways for part in quick)
        yield from (ways[-1] | part for part in parts if part not in quick)

    def rollouts(self) -> Iterator[Changes]:
        """Yield what leaves a rollout as it is, the quickest first."""
        moved: Changes = {} if self.settings.sharding["cpu_offload"] else {"offload.optimizer": True}
        yield from ({}, moved)
        envs, workers = self.settings.env["num_envs"] // self.processes, self.settings.env.get("num_workers") or 1
        stages = 2 * self.settings.pipeline["stages"]
        while envs % stages == 0 and envs // stages >= workers and self.settings.env.get("backend") != "cuda":
            yield moved | {"pipeline.stages": stages}
            stages *= 2

    def fit(self, limit: float, typed: set[str]) -> Changes | None:
        """Return changes with which update and rollout are at most ``limit`` GB; ``None`` if there are none."""

        def first(ways: Iterator[Changes], part: int) -> Changes | None:
            free = ({name: value for name, value in way.items() if name not in typed} for way in ways)
            return next((way for way in free if self.peaks(way)[part] <= limit), None)

        update, rollout = first(self.updates(), 0), first(self.rollouts(), 1)
        return None if update is None or rollout is None else {**self.others, **update, **rollout}
