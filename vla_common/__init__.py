"""What environments, policies and algorithms share: key names, errors, checks of values. Imports nothing of ours."""
