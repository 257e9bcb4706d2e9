"""How a recipe divides its policy among the processes that train it: the section ``sharding``."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from vla_algos import distributed
from vla_common.settings import Count
from vla_policies import VLAPolicy
from vla_policies.memory import Memory, MemoryPlan, calculate, group_parameters
from vla_policies.sharding import shard


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How weights, gradients and Adam are divided, and in which precision is computed.

    Several processes always divide them, by :func:`vla_policies.sharding.shard`; one alone does where it computes in
    another precision than its weights' or keeps them in host memory. Otherwise it has plain weights.

    Attributes:
        shards: processes that share one copy; ``"all"``, or a number that divides theirs: 1 for a copy in each.
        compute: ``"bf16"`` computes in bfloat16 on weights that are kept, and stepped, in float32; ``None`` computes in
            the precision of the weights.
        reshard_after_forward: free the weights of a block after its forward pass, and gather them again for the
            backward pass: less memory, more to exchange.
        cpu_offload: keep weights, gradients and Adam in host memory.
    """

    shards: Count | Literal["all"] = "all"
    compute: Literal["bf16"] | None = None
    reshard_after_forward: bool = True
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        distributed.check_shards(self.shards, distributed.world_size())

    @property
    def number(self) -> int:
        """How many processes share one copy."""
        return distributed.world_size() if self.shards == "all" else self.shards

    def memory_plan(self, offload_optimizer: bool) -> MemoryPlan:
        """Say what of it concerns memory."""
        return MemoryPlan(self.number, self.compute is not None, offload_optimizer, self.cpu_offload)

    def describe(self, offload_optimizer: bool) -> str:
        """Say how a policy is divided, for printing; nothing where one process has it all and computes as it is."""
        plan, processes = self.memory_plan(offload_optimizer), distributed.world_size()
        if processes == 1 and plan == MemoryPlan():
            return ""
        counted = [f"{processes} process{'es' * (processes > 1)}", f"{self.number} shard{'s' * (self.number > 1)}"]
        _, *others = str(plan).split(", ")
        return ", ".join([*counted, *others])

    def divider(self, device: str | None) -> Callable[[VLAPolicy], None] | None:
        """Return what divides a policy, as ``make_policy(shard=...)`` takes it; ``None`` where one process has it all.

        ``device`` is that on which the policy is asked to compute; ``None`` for its own choice.
        """
        if distributed.world_size() == 1 and self.compute is None and not self.cpu_offload:
            return None
        how = {"reshard_after_forward": self.reshard_after_forward, "cpu_offload": self.cpu_offload}
        compute = None if self.compute is None else torch.bfloat16

        def divide(policy: VLAPolicy) -> None:
            kinds = {parameter.device.type for parameter in policy.parameters()}  # meta: it has not been read yet
            kind = torch.device(device or policy.default_device()).type if "meta" in kinds else kinds.pop()
            shard(policy, distributed.device_mesh(self.number, kind), compute=compute, **how)

        return divide


def check_same_draws() -> None:
    """Refuse (RuntimeError) weights drawn differently, told by torch's generator, which all processes seeded alike."""
    if len(set(distributed.all_gather_object(torch.get_rng_state().numpy().tobytes()))) > 1:
        raise RuntimeError(
            "the processes have drawn different random numbers while they made the policy, so that its new weights "
            "differ; draw them from torch's generator, and as many in every process"
        )


def say_host_memory(policy: VLAPolicy, plan: MemoryPlan) -> None:
    """Say how much host memory weights and Adam will take on this machine, if they do; ValueError if there is less."""
    memory: Memory = calculate(group_parameters(policy, blocks=False), plan)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = processes * memory.host / 1e9
    if not memory.host:
        return
    free = _free()
    distributed.barrier()  # or a process might find taken what it has counted among the needed
    kept = "weights, gradients and Adam" if plan.cpu_offload else "Adam"
    text = f"host memory for {kept} of {processes} process{'es' if processes > 1 else ''}: {needed:.3g} GB"
    if needed > free:
        raise ValueError(
            f"{text}, and {free:.3g} GB of this machine are free; train adapters (policy.lora_rank=32), take more GPUs "
            "or machines, or a job with more memory (launcher.memory_gb)"
        )
    print(f"{text}; {free:.3g} GB of this machine are free")


def say_room(needed: int, folder: Path) -> str:
    """Say what decisions will take, in bytes, of host memory and of the disk. ValueError: there is less of either."""
    written = sum(file.stat().st_size for file in (folder / "replay").rglob("*"))  # by the run that is resumed
    text = f"decisions take up to {needed / 1e9:.3g} GB of host memory and of the disk"
    for free, what in ((_free(), "host memory"), ((shutil.disk_usage(folder).free + written) / 1e9, "the disk")):
        if needed / 1e9 > free:
            raise ValueError(f"{text}, and {free:.3g} GB of {what} are free; type fewer iterations, or make room")
    return text


def _free() -> float:
    """Return the GB of host memory that this machine, or what SLURM has given of it, can still give."""
    free, given = psutil.virtual_memory().available, int(os.environ.get("SLURM_MEM_PER_NODE", "0")) * 1024**2
    return min(free, given or free) / 1e9
