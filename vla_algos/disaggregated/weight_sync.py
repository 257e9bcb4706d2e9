"""Trained weights from the processes that learn to those that only collect: by broadcast, tensor by tensor.

What training changes is sent, and nothing else: with adapters these alone, with normalisation statistics and other
saved buffers. Of a sharded policy one tensor after the other is gathered, sent, and freed.
"""

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from vla_algos import distributed
from vla_policies.sharding import compute_device, reshard, trained_tensors

_SENDER = 0  # rank of an actor, always


class WeightSync:
    """Sends the trained weights of rank 0 to the processes that only collect, at each :meth:`transfer`.

    A receiver has the same policy, whole. It is written in place, in its own dtype: weights that are float32 in rank 0
    and bfloat16 there are rounded before they are gathered. All processes make the same calls, after a barrier. A
    ``ValueError`` in all of them if a receiver has no place for something.

    ``policy`` is of this process, ``group`` of rank 0 and the receivers; ``receives`` says whether this process is one
    of these, the others are rank 0, or help to gather. ``bytes`` are what each receiver gets by a transfer, ``seconds``
    those of the last one until all was there, waiting for others included.
    """

    def __init__(self, policy: nn.Module, group: dist.ProcessGroup, *, receives: bool):
        self._policy, self._group, self.receives = policy, group, receives
        self._device = compute_device(next(policy.parameters()))
        self._sent = self._agree()
        self.seconds, self.bytes = 0.0, sum(kind.nbytes for kind in self._sent.values())

    def transfer(self) -> None:
        """Send, help to gather, or receive; returns when all is there."""
        started = time.perf_counter()
        self._receive() if self.receives else self._send()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds = time.perf_counter() - started

    def _agree(self) -> dict[str, Tensor]:
        """Tell each other what there is; returns shapes and dtypes of what is sent (meta device)."""
        own = _places(self._policy) if self.receives else trained_tensors(self._policy)
        kinds = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in own.items()}
        processes = distributed.all_gather_object((dist.get_rank(), self.receives, self._device.type, kinds))
        (_, _, device, sent), receivers = processes[_SENDER], [each for each in processes if each[1]]
        for rank, _, device_there, places in receivers:
            _check_places(sent, places, rank)
            if device_there != device:
                self._device = torch.device("cpu")
        dtypes = {name: {places[name].dtype for *_, places in receivers} for name in sent}
        return {name: kind.to(_smaller(kind.dtype, dtypes[name])) for name, kind in sent.items()}

    def _send(self) -> None:
        weights = trained_tensors(self._policy)
        for name, kind in self._sent.items():
            whole = _whole(weights[name], kind.dtype)
            if whole is not None and whole.numel() and dist.get_rank() == _SENDER:
                self._broadcast(whole.to(self._device).contiguous())

    def _receive(self) -> None:
        places = _places(self._policy)
        for name, kind in self._sent.items():
            if places[name].numel():
                room = torch.empty_like(kind, device=self._device)
                self._broadcast(room)
                places[name].copy_(room)

    def _broadcast(self, tensor: Tensor) -> None:
        # As bytes, of whatever dtype, such as bool, which gloo does not know.
        dist.broadcast(tensor.view(-1).view(torch.uint8), _SENDER, group=self._group)


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return a tensor as it is sent; ``None`` where others gather it."""
    if not isinstance(tensor, DTensor):
        return tensor.to(dtype)
    mesh = tensor.device_mesh
    [source] = (mesh.mesh == _SENDER).nonzero().tolist()
    here = mesh.get_coordinate()
    assert here is not None  # it has a part
    apart = zip(tensor.placements, source, here, strict=True)
    if any(isinstance(kind, Replicate) and one != other for kind, one, other in apart):
        return None  # a replica of its own
    rounded = tensor.to(dtype)
    assert isinstance(rounded, DTensor)
    return rounded.full_tensor()


def _places(policy: nn.Module) -> dict[str, Tensor]:
    """Return where each tensor of a policy that collects is, frozen there or not; a group of one has all of it."""
    reshard(policy)
    places = {name: tensor.detach() for name, tensor in policy.state_dict().items()}
    return {name: place.to_local() if isinstance(place, DTensor) else place for name, place in places.items()}


def _smaller(dtype: torch.dtype, of_receivers: set[torch.dtype]) -> torch.dtype:
    """Return in which dtype a tensor is sent: that of all receivers where it is smaller, which rounds as they would."""
    [one, *others] = of_receivers
    smaller = not others and one.is_floating_point and dtype.is_floating_point and one.itemsize < dtype.itemsize
    return one if smaller else dtype


def _check_places(sent: Mapping[str, Tensor], places: Mapping[str, Tensor], rank: int) -> None:
    wrong = [
        f"{name} is {list(kind.shape)} and there {list(places[name].shape) if name in places else 'missing'}"
        for name, kind in sent.items()
        if name not in places or places[name].shape != kind.shape
    ]
    if wrong:
        raise ValueError(
            f"process {rank} rolls out another policy than process {_SENDER} trains: {len(wrong)} of {len(sent)} "
            f"tensors differ, such as: {wrong[0]}; make both with the same policy settings"
        )
