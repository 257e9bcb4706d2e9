"""How near numbers of the same computation in another order have to be: by their dtype and size, not in absolute terms."""

import torch

# Epsilons that rounding may add up to. At numbers of size one 7.6e-6 in float32: a few layers, measured up to 5e-6.
ROUNDINGS = 64


def relative(found, expected):
    """Return the norm of the difference over the norm of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


def assert_near(found, expected, roundings=ROUNDINGS):
    """Compare number by number.

    None may be off by more than ``roundings`` epsilons of its own size, or of the root mean square of all where that is
    larger: a small number may be the difference of two of that size.
    """
    size = expected.abs().clamp_min(expected.square().mean().sqrt())
    epsilon = torch.finfo(expected.dtype).eps
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.isfinite().all()
    worst = ((found - expected).abs() / (epsilon * size)).nan_to_num(0.0).max().item()
    assert worst <= roundings, f"off by {worst:.0f} epsilons, at most {roundings}"
