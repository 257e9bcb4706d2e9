"""What this machine has and lacks for the environments: ``python -m vla_envs``."""
