"""What a storm of faults came to."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Faults and how they ended.

    Attributes:
        kinds: how many there were of each kind.
        failures: a line for each that did not survive, with what is needed to try it again.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return self.kinds.total()

    @property
    def clean(self) -> bool:
        return self.tried > 0 and not self.failures

    def note(self, outcome: str, kind: str, what: str = "") -> None:
        """Count a fault; ``outcome`` is ``survived``, or how it ended: ``lost``, ``hung`` or ``wrong``."""
        self.kinds[kind] += 1
        if outcome != "survived":
            self.failures.append(f"{outcome}: {kind} {what}".rstrip())
