"""Folders of weights: finding, reading, writing, adapting."""
