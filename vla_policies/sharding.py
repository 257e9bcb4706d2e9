"""A policy whose weights lie in parts on several GPUs, by FSDP2.

:func:`torch.distributed.fsdp.fully_shard` (Zhao et al. 2023, arXiv 2304.11277) gathers the weights of a group before
its modules run and frees them afterwards; :meth:`vla_policies.policy.VLAPolicy.shard_groups` are a policy's groups.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributions import Distribution

ENTRY_POINTS = ("get_dist", "evaluate_actions", "imitation_loss")


@dataclass(frozen=True)
class ShardGroup:
    """A module whose weights are gathered before its ``forward`` and freed after it.

    Nothing may read them but its ``forward``, called through ``module(...)``: only there FSDP's hooks run. Groups may
    be nested. ``returns_float32``: what it returns is cast to float32 where it computes in another dtype.
    """

    module: nn.Module
    returns_float32: bool = False


def shard(
    policy: nn.Module,
    mesh: DeviceMesh,
    *,
    compute: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> None:
    """Divide the weights of a policy among processes, in place; all of them must have the same.

    Its parameters are DTensors afterwards. Gradients are those of the *sum* of the processes' losses, in float32: each
    has its share of a loss over all data, none may be left out of a pass. Every process must make the same calls of the
    policy and its ``entry_points``; other methods, such as ``precompute``, are called while the weights are gathered.

    Args:
        policy: says its groups (``shard_groups()``) and ``entry_points``; a module that does not is one group.
        mesh: ``[shards]``, or ``[replicas, shards]``: weights are divided among the shards, and each replica has all.
        compute: dtype in which the groups compute, with weights that are rounded after they were gathered; ``None``
            for that of the weights, in which the root (what is in no group: heads, final norms) computes always.
        reshard_after_forward: free a group's weights after its forward pass and gather them again for the backward
            pass; otherwise they are kept between the two.
        cpu_offload: keep parameters, gradients and optimizer states in host memory.

    Raises:
        ValueError: weights that cannot be divided, says which; or ``compute`` would change nothing.
    """
    groups: Sequence[ShardGroup] = getattr(policy, "shard_groups", tuple)()
    _check(policy, groups)
    if compute is not None and not groups:
        raise ValueError(
            f"{type(policy).__name__} has no shard_groups(), and what is in none computes in the dtype of its weights: "
            "leave compute (sharding.compute) out"
        )
    # Keys and values of a layer are views that are not changed in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    offload = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else fsdp.OffloadPolicy()
    exact = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for group in groups:
        returned = torch.float32 if group.returns_float32 else None
        rounded = fsdp.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, output_dtype=returned)
        fsdp.fully_shard(
            group.module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=exact if compute is None else rounded,
            offload_policy=offload,
        )
    # The root is gathered once for both passes: it begins the one and ends the other.
    fsdp.fully_shard(policy, mesh=mesh, reshard_after_forward=False, mp_policy=exact, offload_policy=offload)
    for module in sharded_modules(policy):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # a divisor of 1 is an operation that gloo does not know
    for name in getattr(policy, "entry_points", ENTRY_POINTS):
        if hasattr(policy, name):
            _register(policy, name)


def sharded_modules(policy: nn.Module) -> list[fsdp.FSDPModule]:
    """List the groups that :func:`shard` has divided, the root first; empty without any."""
    return [module for module in policy.modules() if isinstance(module, fsdp.FSDPModule)]


def compute_device(parameter: Tensor) -> torch.device:
    """Return where a parameter is computed with: one of a sharded policy may be kept in host memory."""
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def storage_device(policy: nn.Module, device: torch.device | str) -> torch.device | str:
    """Return where weights that are computed with on ``device`` are kept: host memory with ``cpu_offload``."""
    groups = [group for module in sharded_modules(policy) if (group := _settings(module))]
    return "cpu" if any(isinstance(group.offload_policy, fsdp.CPUOffloadPolicy) for group in groups) else device


def place(policy: nn.Module, device: torch.device | str) -> None:
    """Move a policy to a device; of a sharded one the buffers, as FSDP has put the parameters where they belong."""
    if not sharded_modules(policy):
        policy.to(device)
        return
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def reshard(policy: nn.Module) -> None:
    """Free what is gathered, so that the parameters of the policy are this process's parts."""
    for module in sharded_modules(policy):
        module.reshard()


@contextlib.contextmanager
def gathered(policy: nn.Module) -> Iterator[None]:
    """Have all weights of a policy in this process: inside it may be called as often as this process likes, or never.

    All processes must enter it, which gathers. Nothing can be learnt inside, and weights must not be changed.
    """
    found = [(module, _settings(module)) for module in sharded_modules(policy)]
    groups = [(module, group is not None and group.post_forward_mesh_info is not None) for module, group in found]
    if not groups:
        yield
        return
    groups[0][0]._get_fsdp_state()._lazy_init()  # or a group that is called before the root would be a root of its own
    for module, _ in groups:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, frees in groups:
            module.reshard()
            module.set_reshard_after_forward(frees, recurse=False)


def _settings(module: fsdp.FSDPModule) -> Any:
    """Return FSDP2's record of a module's own parameters, ``None`` if it has none; there is nothing public to read."""
    return module._get_fsdp_state()._fsdp_param_group  # the name that torch 2.11 has too


def _check(policy: nn.Module, groups: Sequence[ShardGroup]) -> None:
    names = {id(parameter): name for name, parameter in policy.named_parameters()}
    owners: dict[int, int] = {}
    inner = {id(group.module) for group in groups}
    for owner, root in enumerate([*(group.module for group in groups), policy]):
        for parameter in {id(parameter) for parameter in _own_parameters(root, inner - {id(root)})}:
            if owners.setdefault(parameter, owner) != owner:
                raise ValueError(
                    f"{type(policy).__name__} uses {names[parameter]} in more than one of its shard_groups(); leave "
                    "those modules out of them, or take one group around both"
                )


def _own_parameters(module: nn.Module, inner: set[int]) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    for child in module.children():
        if id(child) not in inner:
            yield from _own_parameters(child, inner)


def _register(policy: nn.Module, name: str) -> None:
    """Let FSDP's hooks run around a method as they do around ``forward``.

    They look for tensors in what it returns, and find none in a distribution: its tensors are returned with it.
    """
    method: Callable[..., Any] = getattr(policy, name)

    def opened(*arguments: Any, **named: Any) -> tuple[Any, list[Tensor]]:
        result = method(*arguments, **named)
        return result, list(_tensors(result)) if isinstance(result, Distribution) else []

    hooked = f"_sharded_{name}"
    setattr(policy, hooked, opened)
    fsdp.register_fsdp_forward_method(policy, hooked)

    def closed(*arguments: Any, **named: Any) -> Any:
        return getattr(policy, hooked)(*arguments, **named)[0]

    setattr(policy, name, closed)


def _tensors(distribution: Distribution) -> Iterator[Tensor]:
    for value in vars(distribution).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Distribution):
            yield from _tensors(value)


def trained_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """Return what training changes (not copies): trained parameters and saved buffers; DTensors if sharded."""
    reshard(policy)
    parameters = dict(policy.named_parameters())
    fixed = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    return {name: tensor.detach() for name, tensor in policy.state_dict().items() if name not in fixed}
