"""How near numbers have to be that were computed in another order: by their dtype and size, not in absolute terms."""

import torch

# Epsilons that rounding may add up to: at numbers of size one 7.6e-6 in float32. Measured are up to 44.
ROUNDINGS = 64
ROUNDINGS_PER_LAYER = 12  # of a transformer: two norms, seven projections, activation, attention, two residual sums


def relative(found, expected):
    """Return the norm of the difference over the norm of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


def assert_near(found, expected, roundings=ROUNDINGS):
    """Compare number by number.

    None may be off by more than ``roundings`` epsilons of its own size. One that is small beside the root mean square
    of all is a difference of such numbers, and is measured by that, or by 1 where that is larger.
    """
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.isfinite().all()
    size = expected.abs().clamp_min(expected.square().mean().sqrt().clamp_max(1.0))
    epsilon = torch.finfo(expected.dtype).eps
    worst = ((found - expected).abs() / (epsilon * size)).nan_to_num(0.0).max().item()
    assert worst <= roundings, f"off by {worst:.0f} epsilons, at most {roundings}"


def rounding_error(dtype, layers):
    """Return the relative error that a stack of transformer layers may make: independent roundings, up to half an
    epsilon each, add up as the root of their number.
    """
    return torch.finfo(dtype).eps / 2 * (ROUNDINGS_PER_LAYER * layers) ** 0.5
