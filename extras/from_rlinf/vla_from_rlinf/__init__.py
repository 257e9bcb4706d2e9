"""Configurations of RLinf as commands of vla-torchrl: what ``vla-from-rlinf FILE.yaml`` prints."""

from vla_from_rlinf.command import Translation, translate

__all__ = ["Translation", "translate"]
