"""What the small policies compute in: float32, or bfloat16 on weights in float32."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

Compute = Literal["auto", "float32", "bf16"]


def has_bfloat16() -> bool:
    """Tell whether torch's default device, the CPU unless another was set, has instructions for bfloat16."""
    if torch.get_default_device().type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("bf16"))  # of x86, of ARM


def settle(config: Any) -> None:
    """Replace ``compute="auto"`` in a frozen configuration, and warn of a bfloat16 that is emulated."""
    if config.compute == "auto":
        object.__setattr__(config, "compute", "bf16" if has_bfloat16() else "float32")
    elif config.compute == "bf16" and not has_bfloat16():
        warnings.warn(
            "compute=bf16: this processor has no instructions for bfloat16; a step takes many times as long as in "
            "float32; for a new policy type policy.compute=auto",
            stacklevel=4,
        )


@contextmanager
def computing(config: Any, device: torch.device) -> Iterator[None]:
    """Within, a small policy's network runs: with ``compute="bf16"`` most of it in bfloat16.

    PyTorch's fast path of transformers, which is taken where nothing is learnt, does not know autocast on CPUs and
    computes in float32: log-probabilities of a rollout would not be those of the update.
    """
    if config.compute != "bf16":
        yield
        return
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.autocast(device.type, torch.bfloat16):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
