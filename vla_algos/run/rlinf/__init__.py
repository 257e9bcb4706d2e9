"""Configurations of RLinf's in our words: what ``vla-recipe from-rlinf`` prints."""

from vla_algos.run.rlinf.command import Translation, translate

__all__ = ["Translation", "translate"]
