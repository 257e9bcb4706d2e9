"""A recipe up to where its work would begin: what would be refused hours later on a node is refused at submission.

The recipe itself runs, with a run that has neither folder nor simulators nor weights; so what is checked, and what is
said, is what the recipe checks and says when it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar, cast

import torch

from vla_algos import parallel
from vla_algos.placement import Placement
from vla_algos.run.launcher_settings import count_processes
from vla_algos.run.plan import Plan
from vla_algos.run.roles import Roles
from vla_algos.run.run import Run
from vla_algos.run.warm_start import demonstration_seed
from vla_common.program import one_line
from vla_policies import VLAPolicy
from vla_policies.registry import check_policy

T = TypeVar("T")


class _EnoughError(Exception):
    """Work would begin."""


class Rehearsal(Run):
    """What a recipe is given instead of a :class:`Run`: it checks, and ends where work would begin.

    Args:
        config: see :class:`Run`.
        folder: see there; it is not written to.

    Attributes:
        placed: the processes that there would be.

    Raises:
        ValueError: see there.
    """

    def __init__(self, config: SimpleNamespace, folder: Path):
        launcher = config.launcher
        placed = Placement.read(
            getattr(config, "placement", {}), count_processes(launcher), launcher.get("tasks_per_node", 1)
        )
        self.placed, self.state, self.differs = placed, {}, {}
        roles = Roles(placed.actors, placed.rollouts, {}, rank=placed.rollouts[0])
        # the cores that a process asks for; 1, of which most settings are right, where a job leaves that open
        cores = parallel.cores() if launcher["name"] != "slurm" else launcher.get("cpus") or 1
        self._take(Plan(config, folder, roles, cores), folder)
        if hasattr(config, "demonstrations"):
            for seed in launcher.get("seeds") or ():
                demonstration_seed(seed, config.eval["seed"])

    def make_policy(self) -> VLAPolicy:
        """Check what :meth:`Run.make_policy` would, without reading weights."""
        policy = check_policy(self.spec, **self.config.policy)
        if policy is None:
            print(
                f"policy.checkpoint={self.config.policy['checkpoint']}: is a hub id whose files are not all here, "
                "and is not checked before it runs. To have it checked: hf download it with --local-dir FOLDER, and "
                "type policy.checkpoint=FOLDER"
            )
            raise _EnoughError
        self.policy = policy
        self.plan.check_policy(policy)
        return policy

    def on_actors(self, make: Callable[[], T]) -> T:
        """Make nothing: it would be of weights."""
        return cast(T, None)

    on_rollouts = on_actors

    def check_results(self) -> None:
        """Nothing has run yet."""

    def make_env(self, policy: VLAPolicy) -> NoReturn:
        """End: simulators would start."""
        raise _EnoughError

    @contextlib.contextmanager
    def resumable(self, **_: Any) -> Iterator[None]:
        """End: the folder would be written to."""
        raise _EnoughError
        yield


def rehearse(train: Callable[[SimpleNamespace, Run], None], config: SimpleNamespace, folder: Path) -> Rehearsal:
    """Run a recipe up to where its work would begin; no bit of a run that follows is another one.

    Args:
        train: see :func:`vla_algos.run.launch.launch`.
        config: the settings, see :func:`vla_algos.run.config.read_config`.
        folder: of the run.

    Returns:
        What it was run with.

    Raises:
        ValueError, OSError, ImportError: what the run would raise.
    """
    with torch.random.fork_rng(devices=[]):
        run = Rehearsal(config, folder)
        try:
            train(config, run)
        except _EnoughError:
            pass
        except (ValueError, OSError, ImportError):
            raise
        except Exception as error:  # of what expects weights or simulators: no reason against the run
            print(
                f"not all settings are checked before the recipe runs: it did not get further without weights and "
                f"simulators than to {type(error).__name__}: {one_line(str(error))}"
            )
    return run
