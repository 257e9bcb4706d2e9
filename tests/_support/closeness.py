"""How near numbers have to be that were computed in another order: by their dtype and size, not in absolute terms."""

import torch

# Epsilons that a formula of some tens of operations may be off by: at numbers of size one 7.6e-6 in float32.
ROUNDINGS = 64
ROUNDINGS_PER_LAYER = 12  # of a transformer: two norms, seven projections, activation, attention, two residual sums
DEVIATIONS = 5  # of a million numbers the largest is about as many standard deviations from their mean


def relative(found, expected):
    """Return the norm of the difference over the norm of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


def through(*networks):
    """Return by how many epsilons numbers may be off behind networks whose sums are taken in another order.

    Other instructions of a CPU, another number of threads and another batch all change the order. A number behind a
    layer is a sum of as many products as a row of its weight is long. Each product and each addition is rounded by up
    to half an epsilon of the sum, in both orders, and roundings are independent: behind ``n`` products, those of all
    layers one after the other, the standard deviation of the difference is at most the root of ``4 n`` halves.
    Multiply it where a result is more sensitive than what the networks return.
    """
    weights = [named for network in networks for named in network.named_parameters() if named[1].ndim > 1]
    products = sum(weight[0].numel() for name, weight in weights if name.endswith("weight"))
    return DEVIATIONS * (4 * products) ** 0.5 / 2


def sharpness(dist):
    """Return how many times as far off as their means the log-probabilities of Gaussians are: one over the smallest
    standard deviation. 1 for tokens.
    """
    scale = getattr(getattr(dist, "base_dist", dist), "scale", torch.ones(1))
    return 1 / scale[scale > 0].min().item()  # a step without noise has no probability


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
    assert worst <= roundings, f"off by {worst:.0f} epsilons, at most {roundings:.0f}"


def rounding_error(dtype, layers):
    """Return the relative error that a stack of transformer layers may make: independent roundings, up to half an
    epsilon each, add up as the root of their number.
    """
    return torch.finfo(dtype).eps / 2 * (ROUNDINGS_PER_LAYER * layers) ** 0.5
