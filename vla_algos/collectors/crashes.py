"""What a run does about episodes whose simulators crash: it counts them, says so, and ends when there are no others."""

from collections.abc import Mapping
from typing import Any

from vla_envs.workers.pool import SimulatorCrash

_IN_A_ROW = 10  # iterations in which no episode finished


def check_crashes(state: dict[str, Any], iteration: int, metrics: Mapping[str, float]) -> str:
    """Return a line if most episodes crash, once, or all of an iteration do; end a run that gets no others.

    ``state`` is the run's, which remembers it; ``metrics`` are of :func:`~vla_algos.metrics.env_metrics`. A
    ``SimulatorCrash`` if in ten iterations in a row every episode that ended had crashed.
    """
    finished, crashed = metrics.get("env/num_episodes", 0.0), metrics.get("env/crashed_episodes", 0.0)
    all_crashed = crashed > 0 and finished == 0
    in_a_row = state["crashed_iterations"] = state.get("crashed_iterations", 0) + 1 if all_crashed else 0
    if in_a_row == _IN_A_ROW:
        raise SimulatorCrash(
            f"in {in_a_row} iterations in a row every episode that ended had crashed; the log names them. Run "
            "`python -m vla_envs` to check the simulator; then type the same command: it resumes"
        )
    if all_crashed:
        return f"iteration {iteration}: no episode finished; all {crashed:.0f} that ended had crashed"
    if crashed <= finished or state.get("said_crashes"):
        return ""
    state["said_crashes"] = True
    return (
        f"iteration {iteration}: {crashed:.0f} of {crashed + finished:.0f} episodes crashed; nothing is learnt from "
        "what they would have been. The log names them, env/crashed_episodes counts them"
    )
