"""Configuration groups of the toy policy, for Hydra's search path."""
