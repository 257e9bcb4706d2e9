"""Algorithms on top of TorchRL: advantages, losses, collectors, evaluation, metrics and checkpoints."""
