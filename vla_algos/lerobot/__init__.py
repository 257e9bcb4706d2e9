"""Data sets in LeRobot's format (v2.1 and v3) as demonstrations, read from a local folder without LeRobot.

:mod:`~vla_algos.lerobot.dataset` reads what a data set is, :mod:`~vla_algos.lerobot.frames` its images, and
:mod:`~vla_algos.lerobot.demonstrations` makes of them what behaviour cloning learns from.
"""
