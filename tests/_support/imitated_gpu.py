"""A GPU made of host memory: whole rollouts and updates run, and what a GPU refuses is refused.

Its tensors say ``gpu:0``, hold real numbers, and do not mix with tensors in host memory: in operations, as indices of
such, or in numpy. It has no kernels, streams or memory of its own, and no autocast. :func:`begin` is for the whole life
of a process: begin it in one of its own. ``WAITS`` counts, by place, where the host would wait for it: a number or a
tensor that goes there or comes back, or a result whose size depends on numbers.
"""

import traceback
from collections import Counter

import torch
from paths import ROOT
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "gpu"
_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_SIZED = {_aten.nonzero.default, _aten.masked_select.default, _aten._unique2.default}
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
WAITS = Counter()


def begin():
    """Add the device ``"gpu"`` to torch."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a parameter's data cannot become another class
    torch._C._set_only_lift_cpu_tensors(True)
    _setup_privateuseone_for_python_backend(NAME, _Backend())
    _Everywhere().__enter__()


class OnGPU(torch.Tensor):
    """A tensor of the device; ``inner`` has its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        place = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), **place, dtype=inner.dtype, device=torch.device(NAME, 0)
        )
        tensor.inner = inner
        return tensor

    def tolist(self):
        return self.inner.tolist()

    def numpy(self, *_, **__):
        raise TypeError("can't convert a tensor of a GPU to numpy: Tensor.cpu() first")

    __array__ = numpy

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


class _Everywhere(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


class _Backend:
    """What torch asks of ``torch.gpu``."""

    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    synchronize = manual_seed_all = staticmethod(lambda *_: None)
    _is_in_bad_fork = staticmethod(lambda: False)


def _run(function, args, kwargs):
    tensors = []
    tree_map_only(torch.Tensor, tensors.append, (args, kwargs))
    _refuse(function, args, tensors)
    asked = kwargs.get("device")
    if _waits(function, args, tensors, asked):
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(f"{ROOT}/vla_")]
        WAITS[f"{frames[-1].filename.removeprefix(f'{ROOT}/')}:{frames[-1].name}" if frames else "elsewhere"] += 1
    inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
    result = function(*inner_args, **inner_kwargs)
    if function is _aten.copy_.default:
        return args[0]
    if asked is None:
        on_gpu = isinstance(args[0], OnGPU) if function in _INDEXING else any(isinstance(t, OnGPU) for t in tensors)
    else:
        on_gpu = torch.device(asked).type == NAME
    if not on_gpu:
        return result
    result = tree_map_only(torch.Tensor, OnGPU, result)
    return return_and_correct_aliasing(function, args, kwargs, result) if tensors and asked is None else result


def _waits(function, args, tensors, asked):
    here = [isinstance(tensor, OnGPU) for tensor in tensors]
    if function in _COPIES:
        there = (
            here[1:] if function is _aten.copy_.default else [asked is not None and torch.device(asked).type == NAME]
        )
        return (asked is not None or len(here) > 1) and here[0] != there[0]
    if function in _INDEXING and here and here[0]:
        return any(each is not None and each.dtype == torch.bool for each in args[1])
    return any(here) and (function in _SIZED or function is _aten._local_scalar_dense.default)


def _refuse(function, args, tensors):
    gpu, host = ([t for t in tensors if isinstance(t, OnGPU) is on] for on in (True, False))
    if not gpu or not host or function in _COPIES or "_foreach" in str(function) or "_fused" in str(function):
        return
    if function in _INDEXING and isinstance(args[0], OnGPU):  # indices may be in host memory
        host = [value for value in args[2:3] if value.dim() and not isinstance(value, OnGPU)]
    elif function not in {*_INDEXING, _aten.clamp.Tensor} and not function._schema.is_mutable:
        host = [tensor for tensor in host if tensor.dim()]  # a number in host memory goes with everything
    if host:
        shapes = ([tuple(t.shape) for t in where] for where in (gpu, host))
        raise RuntimeError("{}: {} on the GPU and {} in host memory".format(function, *shapes))


def _inner(value):
    if isinstance(value, OnGPU):
        if value.inner.dtype != value.dtype:  # after parameter.data = ...
            value.inner = value.inner.to(value.dtype)
        return value.inner
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value
