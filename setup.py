"""Which packages a wheel has; everything else is in ``pyproject.toml``, which cannot say that a folder is renamed."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["vla_*"]), "vla_recipes"], package_dir={"vla_recipes": "recipes"})
