"""Runnable recipes with their configuration; ``vla-recipe list`` names them, ``vla-recipe copy ppo`` copies one out.

In a checkout this is the folder ``recipes/``, in an installation the package ``vla_recipes``.
"""
