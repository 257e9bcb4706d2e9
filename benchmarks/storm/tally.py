"""What a storm of faults came to: the row that each storm adds to the table of docs/reliability.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

COLUMNS = ("tried", "survived", "lost", "hung", "silently wrong")


@dataclass
class Tally:
    """Faults of one kind and how they ended.

    Attributes:
        name: of the storm, for the table.
        tried: faults.
        survived: the run went on, or resumed, to the right result; or the input was refused by name.
        lost: work that was there before the fault is gone, such as a checkpoint or finished episodes.
        hung: had not ended in time.
        wrong: ended as if all were well, with another result; or nonsense was accepted.
        kinds: how many there were of each kind of fault, as far as one wants to know.
        failures: a line for each fault that was lost, hung or wrong: enough to try it again.
    """

    name: str
    tried: int = 0
    survived: int = 0
    lost: int = 0
    hung: int = 0
    wrong: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def note(self, outcome: str, kind: str, what: str = "") -> None:
        """Count a fault; ``outcome`` is ``survived``, ``lost``, ``hung`` or ``wrong``."""
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.tried += 1
        self.kinds[kind] += 1
        if outcome != "survived":
            self.failures.append(f"{outcome}: {kind} {what}".rstrip())

    @property
    def clean(self) -> bool:
        """Whether nothing was lost, hung or wrong."""
        return self.tried > 0 and self.survived == self.tried


def table(tallies: Iterable[Tally]) -> str:
    """Tabulate storms in Markdown."""
    lines = [f"| storm | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    for tally in tallies:
        numbers = (tally.tried, tally.survived, tally.lost, tally.hung, tally.wrong)
        lines.append(f"| {tally.name} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)
