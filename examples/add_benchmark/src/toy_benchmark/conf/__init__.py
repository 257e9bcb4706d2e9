"""Configuration groups of the toy benchmark, for Hydra's search path."""
