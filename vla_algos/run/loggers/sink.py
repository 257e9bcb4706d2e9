"""What a run gives its numbers, videos and settings to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class Sink:
    """A place where the numbers of a run go, beside ``metrics.jsonl``; whatever it raises never ends the run.

    Attributes:
        name: of the logger, as it is typed.
    """

    name: str

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take numbers of an iteration."""
        raise NotImplementedError

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Take the settings of the run, a section each; where there is no place for them, nothing happens."""

    def log_videos(self, videos: Mapping[str, Path], step: int) -> None:
        """Take videos (mp4) by the names they get; where there is no place for them, nothing happens."""

    def sync(self) -> None:
        """Write what waits; called before each checkpoint."""

    def close(self, failed: bool) -> None:
        """Write the rest; ``failed`` if the run was broken off."""

    def where(self) -> str:
        """Say how one looks at it, for printing."""
        raise NotImplementedError


def kind_of(metrics: Iterable[str]) -> str:
    """Tell names of an evaluation from those of training: of an iteration, either may come again without the other."""
    return "eval" if any(name.startswith("eval") for name in metrics) else "train"
