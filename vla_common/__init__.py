"""What environments, policies and algorithms share: key names, errors, checks of values. Imports nothing of ours."""

__version__ = "0.1.0"  # of all packages; pyproject.toml reads it here
