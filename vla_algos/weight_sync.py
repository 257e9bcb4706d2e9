"""Weights of a policy that is trained in some processes to those that roll it out: a weight sync scheme of TorchRL's.

What training changes is sent, and nothing else: with adapters these alone, with normalisation statistics and other
saved buffers. Tensor by tensor: of a sharded policy one is gathered, sent, and freed, while the next is on its way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torchrl.weight_update.weight_sync_schemes import WeightStrategy, WeightSyncScheme

from vla_policies.sharding import compute_device, reshard

AHEAD = 4  # tensors under way: 0.39 s for 448 MB in 56 tensors over gloo, where one after the other takes 0.48


def trained_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """Return what training changes, itself: parameters that have a gradient, and all saved buffers.

    Of a sharded policy they are this process's parts (DTensors).
    """
    reshard(policy)
    parameters = dict(policy.named_parameters())
    fixed = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    return {name: tensor.detach() for name, tensor in policy.state_dict().items() if name not in fixed}


class TrainedWeightSyncScheme(WeightSyncScheme):
    """Sends what actors train to the processes that roll out, by broadcast, in groups that exist already.

    TorchRL's own schemes start workers, or count ranks of a world of their own, and know no sharded policy; this one is
    used in the same way. In every actor, whether it sends or helps to gather::

        scheme = TrainedWeightSyncScheme(group)
        scheme.init_on_sender(model_id="policy", model=policy)
        scheme.connect()  # checks names and shapes, and sends for the first time
        scheme.send()

    In every process that rolls out, ``init_on_receiver(model_id="policy", model=policy)``, ``connect()`` and
    ``receive()``; or with a collector, once it was told a ``worker_idx``,
    ``collector.register_scheme_receiver({"policy": scheme})`` and ``collector.receive_weights()``. The policy there is
    of the same kind, and whole; it is written in place, in its own dtype: weights that are float32 in the actor and
    bfloat16 there are rounded, before they are gathered.

    All must make the same calls, and reach ``connect``, ``send`` and ``receive`` within the time-out of the groups: who
    may be waited for longer is waited for before, such as by :func:`vla_algos.parallel.barrier`.

    Args:
        group: of the sender and the receivers; of an actor that only helps to gather what
            ``torch.distributed.new_group`` returns to who is not in it.
        sender: which of the actors sends, its rank among all processes.
        everyone: group of all actors and receivers, which compare names and shapes on the CPU; ``None`` for all
            processes that there are.

    Attributes:
        transfer: the last one, ``None`` before.
    """

    def __init__(self, group: dist.ProcessGroup, *, sender: int = 0, everyone: dist.ProcessGroup | None = None):
        super().__init__()
        self._group, self._sender, self._everyone = group, sender, everyone

    @property
    def transfer(self) -> Transfer | None:
        """See the class."""
        return None if self._shared_transport is None else self._shared_transport.transfer

    def _init_on_sender_impl(
        self, *, model_id: str = "policy", model: nn.Module | None = None, context: Any = None
    ) -> None:
        self._begin(model_id, model, context)

    def _init_on_receiver_impl(
        self,
        *,
        model_id: str = "policy",
        context: Any = None,
        model: nn.Module | None = None,
        worker_idx: int | None = None,
    ) -> None:
        self._begin(model_id, model, context)

    def _begin(self, model_id: str, model: nn.Module | None, context: Any) -> None:
        self.model_id, self.context = model_id, context
        if model is not None:
            self.model = model
        if model is None and context is None:
            raise ValueError("which policy? pass model=policy, or the collector that has it: context=collector")
        self.shared_transport = self.create_transport()

    def create_transport(self, **_: Any) -> BroadcastTransport:
        """Return what sends, receives or helps to gather, as this process does."""
        return BroadcastTransport(self.model, self._group, self._sender, self._everyone)

    def prepare_weights(
        self, weights: Any, model_id: str, strategy: WeightStrategy, context: Any = None
    ) -> Mapping[str, Tensor]:
        """Return by name what is to be sent, itself.

        Args:
            weights: ``None`` for those of the policy; those of a module, a TensorDict, or a mapping, such as copies of
                :func:`trained_tensors` that were taken earlier.
            model_id: of the policy.
            strategy: not needed: nothing is copied.
            context: not needed.
        """
        if weights is None or isinstance(weights, nn.Module):
            return trained_tensors(self.model if weights is None else weights)
        return dict(weights.flatten_keys(".").items()) if isinstance(weights, TensorDictBase) else weights

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Send, to all receivers, or help to gather; returns when they have it.

        Args:
            weights: see :meth:`prepare_weights`.
            worker_ids: there is no choice.

        Raises:
            ValueError: receivers are chosen, or something is missing.
        """
        if worker_ids is not None:
            raise ValueError(f"worker_ids={worker_ids}: weights go to all receivers at once; leave worker_ids out")
        super().send(weights)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        self._shared_transport.connect(sends=True)
        self.send(weights)

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        self._shared_transport.connect(sends=False)
        self._shared_transport.receive_weights(model=self.model)


@dataclass(frozen=True)
class Transfer:
    """What it took: seconds until all was there, waiting for others included, and bytes that each receiver has got."""

    seconds: float
    bytes: int

    def metrics(self) -> dict[str, float]:
        """Return it for the log."""
        return {"time/weight_sync": self.seconds, "sync/megabytes": self.bytes / 1e6}


@dataclass(frozen=True)
class _Tensor:
    """A tensor as a process has it, for comparing."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Process:
    """What a process tells the others: who it is and what it has."""

    rank: int
    sends: bool
    device: str
    tensors: Mapping[str, _Tensor]


class BroadcastTransport:
    """Broadcasts tensors one after the other, several under way; all processes know which, from :meth:`connect`."""

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, sender: int, everyone: dist.ProcessGroup | None = None
    ):
        self._group, self._sender, self._everyone = group, sender, everyone
        self._model = model
        self._device = compute_device(next(model.parameters()))
        self._sent: dict[str, _Tensor] = {}  # with the dtype on the way
        self.transfer: Transfer | None = None

    def connect(self, sends: bool) -> None:
        """Agree on what is sent, with all actors and receivers.

        Raises:
            ValueError: in all of them, if some receiver has no place for something.
        """
        own = trained_tensors(self._model) if sends else _places(self._model)
        told = {name: _Tensor(tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()}
        mine = _Process(dist.get_rank(), sends, self._device.type, told)
        everybody: list[Any] = [None] * dist.get_world_size(self._everyone)
        dist.all_gather_object(everybody, mine, group=self._everyone)
        [source] = [each for each in everybody if each.rank == self._sender] or [None]
        receivers = [each for each in everybody if not each.sends]
        if source is None or not source.sends or not receivers:
            raise ValueError(
                f"process {self._sender} is to send weights, of {[each.rank for each in everybody if each.sends]} that "
                f"train, to {[each.rank for each in receivers]}; take sender= one that trains, and a receiver"
            )
        for receiver in receivers:
            _check_places(source, receiver)
        if any(each.device != source.device for each in receivers):
            self._device = torch.device("cpu")
        for name, tensor in source.tensors.items():
            dtypes = {receiver.tensors[name].dtype for receiver in receivers}
            self._sent[name] = _Tensor(tensor.shape, _smaller(tensor.dtype, dtypes))

    def send_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Send tensors by name; of more than were agreed on only those.

        Raises:
            ValueError: one is missing, or has another shape.
        """
        wrong = [name for name, kind in self._sent.items() if name not in weights or weights[name].shape != kind.shape]
        if wrong:
            raise ValueError(
                f"these are not the weights that were agreed on: {len(wrong)} are missing or have another shape, such "
                f"as {wrong[0]}; pass trained_tensors(policy), or copies of them"
            )
        started = time.perf_counter()
        under_way: deque[tuple[dist.Work, Tensor]] = deque()
        for name, kind in self._sent.items():
            whole = self._whole(weights[name], kind.dtype)
            if whole is not None and whole.numel() and dist.get_rank() == self._sender:
                under_way.append(self._broadcast(whole.to(self._device).contiguous()))
            if len(under_way) > AHEAD:
                under_way.popleft()[0].wait()
        for work, _ in under_way:
            work.wait()
        self._note(started)

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> nn.Module:
        """Write what comes into the policy, and return it.

        Args:
            timeout: that of the group, no other.
            weights: not needed, nothing is copied.
            model: the policy.
            strategy: not needed.

        Raises:
            ValueError: with a ``timeout``.
        """
        if timeout is not None:
            raise ValueError(f"timeout={timeout}: what is awaited comes by the time-out of the group; leave it out")
        started = time.perf_counter()
        own, under_way = _places(self._model), deque[tuple[dist.Work, Tensor, Tensor]]()
        for name, kind in self._sent.items():
            place = own[name]
            fits = place.dtype == kind.dtype and place.device == self._device and place.is_contiguous()
            if place.numel():
                room = place if fits else torch.empty(kind.shape, dtype=kind.dtype, device=self._device)
                under_way.append((*self._broadcast(room), place))
            if len(under_way) > AHEAD:
                _put(*under_way.popleft())
        for some in under_way:
            _put(*some)
        self._note(started)
        return self._model

    def _broadcast(self, tensor: Tensor) -> tuple[dist.Work, Tensor]:
        data = tensor.view(-1).view(torch.uint8)  # of whatever dtype, such as bool, which gloo does not know
        return dist.broadcast(data, self._sender, group=self._group, async_op=True), tensor

    def _whole(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor as it is sent; ``None`` where others gather it."""
        if not isinstance(tensor, DTensor):
            return tensor.to(dtype)
        mesh = tensor.device_mesh
        [source] = (mesh.mesh == self._sender).nonzero().tolist()
        here = mesh.get_coordinate()
        assert here is not None  # it has a part
        apart = zip(tensor.placements, source, here, strict=True)
        if any(isinstance(kind, Replicate) and one != other for kind, one, other in apart):
            return None  # a replica of its own
        rounded = tensor.to(dtype)
        assert isinstance(rounded, DTensor)
        return rounded.full_tensor()

    def _note(self, started: float) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        size = sum(torch.Size(kind.shape).numel() * kind.dtype.itemsize for kind in self._sent.values())
        self.transfer = Transfer(time.perf_counter() - started, size)


def _places(policy: nn.Module) -> dict[str, Tensor]:
    """Return where each tensor of a policy that rolls out is, frozen there or not; a group of one has all of it."""
    reshard(policy)
    places = {name: tensor.detach() for name, tensor in policy.state_dict().items()}
    return {name: place.to_local() if isinstance(place, DTensor) else place for name, place in places.items()}


def _put(work: dist.Work, room: Tensor, place: Tensor) -> None:
    work.wait()
    if room is not place:
        place.copy_(room)


def _smaller(dtype: torch.dtype, of_receivers: set[torch.dtype]) -> torch.dtype:
    """Return in which dtype a tensor is sent: that of all receivers where it is smaller, which rounds as they would."""
    [one, *others] = of_receivers
    smaller = not others and one.is_floating_point and dtype.is_floating_point and one.itemsize < dtype.itemsize
    return one if smaller else dtype


def _check_places(source: _Process, receiver: _Process) -> None:
    wrong = [
        f"{name} is {list(tensor.shape)} and there {list(there.shape) if there is not None else 'missing'}"
        for name, tensor in source.tensors.items()
        if (there := receiver.tensors.get(name)) is None or there.shape != tensor.shape
    ]
    if wrong:
        raise ValueError(
            f"process {receiver.rank} rolls out another policy than process {source.rank} trains: {len(wrong)} of "
            f"{len(source.tensors)} tensors differ, such as: {wrong[0]}; make both with the same policy settings"
        )
