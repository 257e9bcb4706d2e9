"""Policies by the name of their family: ours and those of any installed package, made, loaded and inspected.

Nothing here knows a family: what is asked of one is written in :mod:`vla_policies.policy`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Optional

from vla_common.checksums import only_names, verify_checksums
from vla_common.errors import unknown_name
from vla_common.registry import policies
from vla_common.schema import EnvironmentShape
from vla_common.settings import check_settings
from vla_policies.checkpoint import layout
from vla_policies.checkpoint.hub import find_cached, is_hub_id, resolve
from vla_policies.checkpoint.report import Report
from vla_policies.checkpoint.settings import SettingError
from vla_policies.outline import Outline
from vla_policies.policy import Sharding, VLAPolicy


def register_policy(name: str, policy_class: type[VLAPolicy]) -> None:
    """Add a family for this process; an entry point of the group ``vla_torchrl.policies`` adds one for good.

    Args:
        name: of the family.
        policy_class: whose ``family`` it is.

    Raises:
        ValueError: the name is taken, or the class says another one.
    """
    if not (isinstance(policy_class, type) and issubclass(policy_class, VLAPolicy)):
        shown = getattr(policy_class, "__name__", repr(policy_class))
        raise TypeError(f"{shown} is no VLAPolicy; derive it from vla_policies.VLAPolicy, whose docstring says how")
    if policy_class.family != name:
        raise ValueError(
            f"{policy_class.__name__}.family is {policy_class.family!r} and it is registered as {name!r}; give it one "
            "name: it is what its checkpoints say"
        )
    policies.register(name, policy_class)


def get_policy_class(family: str) -> type[VLAPolicy]:
    """Find the class of a family.

    Raises:
        ValueError: there is none of that name; offers the nearest ones.
        ImportError: the package that declares it cannot be imported.
    """
    if family not in policies:
        raise unknown_name("policy.family", str(family), policies.names())
    found = policies.get(family)
    if not (isinstance(found, type) and issubclass(found, VLAPolicy) and found.family == family):
        raise ImportError(
            f"the entry point {family!r} of {policies.group} must be a VLAPolicy of that family, not {found!r}"
        )
    return found


def policy_types(family: str) -> dict[str, Any]:
    """Annotate every keyword argument of :func:`make_policy` for a family: the ``policy:`` of a configuration.

    Each may be ``None`` too: the class's default, or what the checkpoint was saved with.
    """
    own = get_policy_class(family).setting_types()
    return {"family": str, **{name: Optional[hint] for name, hint in {"checkpoint": str, **own}.items()}}  # noqa: UP045


def make_policy(
    shape: EnvironmentShape,
    *,
    family: str,
    checkpoint: str | Path | None = None,
    shard: Sharding | None = None,
    **settings: Any,
) -> VLAPolicy:
    """Make a policy that is complete and known to fit an environment, which need not have been started.

    Args:
        shape: of the environment, such as a :class:`vla_envs.SimulatorSpec`.
        family: a registered name. One that is made new takes checkpoints of every family.
        checkpoint: folder or hub id.
        shard: shards it over processes before its weights are read, such as by ``fully_shard`` on its blocks and on
            itself; see :meth:`vla_policies.policy.PretrainedPolicy.from_pretrained`.
        **settings: see :func:`policy_types`; ``None`` leaves one to the class, or to the checkpoint.

    Raises:
        FileNotFoundError: no such checkpoint.
        ValueError: settings or an environment that do not fit it; names a setting as recipes type it.
    """
    policy_class = get_policy_class(family)
    chosen = {name: value for name, value in settings.items() if value is not None}
    check_settings("policy", chosen, policy_class.setting_types())
    if shard is not None:
        chosen["shard"] = shard
    try:
        if checkpoint and not policy_class.needs_checkpoint:
            path = resolve(checkpoint)
            found = _class_of(path, policy_class)
            policy = found.from_pretrained(path, device=found.default_device(), **chosen)
        else:
            policy = policy_class.make(shape, checkpoint or None, **chosen)
        policy.check_environment(shape)
    except SettingError as error:
        raise ValueError(f"policy.{error}") from error
    except ValueError as error:
        if policy_class.needs_checkpoint and (other := _other_family(policy_class, checkpoint)) is not None:
            if get_policy_class(other).__module__.split(".")[:2] == policy_class.__module__.split(".")[:2]:
                raise  # of one room: without heads OpenVLA-OFT's files look like OpenVLA's
            raise ValueError(
                f"policy.checkpoint={checkpoint}: is a checkpoint of {other}, not of {family}; type policy={other}"
            ) from error
        raise
    return policy


class _CompleteError(Exception):
    """Ends the making of a policy before its weights are read."""


def check_policy(
    shape: EnvironmentShape, *, family: str, checkpoint: str | Path | None = None, **settings: Any
) -> VLAPolicy | None:
    """Check all that :func:`make_policy` would before it reads weights: settings, files, statistics, names and shapes.

    A family that starts from checkpoints is made as it is for sharding, and no tensor of its model is read; one that
    is made new is small, and made. Nothing is downloaded, and digests are not computed.

    Args:
        shape: see :func:`make_policy`, as for the others.
        family: see there.
        checkpoint: see there.
        **settings: see there.

    Returns:
        The policy, whose model is on the meta device if it is a checkpoint's; ``None`` where ``checkpoint`` is a hub id
        of which files are not here, so that nothing is known.

    Raises:
        FileNotFoundError, ValueError: what :func:`make_policy` would raise.
    """
    policy_class, cached = get_policy_class(family), False
    if checkpoint and is_hub_id(checkpoint):
        if (found := find_cached(str(checkpoint))) is None:
            return None
        checkpoint, cached = found, True
    made: list[VLAPolicy] = []

    def stop(policy: VLAPolicy) -> None:
        policy.check_environment(shape)
        made.append(policy)
        raise _CompleteError

    try:
        with only_names():
            if checkpoint and not policy_class.needs_checkpoint:  # one that is made new takes those of every family
                policy_class = _class_of(resolve(checkpoint), policy_class)
            shard = stop if policy_class.needs_checkpoint else None
            return make_policy(shape, family=family, checkpoint=checkpoint, shard=shard, **settings)
    except _CompleteError:
        return made[0]
    except FileNotFoundError as error:
        if cached and str(checkpoint) in str(error):  # the run downloads what lacks of it
            return None
        raise


def _class_of(path: Path, policy_class: type[VLAPolicy]) -> type[VLAPolicy]:
    return policy_class if policy_class.recognises(path) else find_policy_class(path)


def _other_family(policy_class: type[VLAPolicy], checkpoint: str | Path | None) -> str | None:
    """Find the family of a checkpoint that a class does not recognise; ``None`` if it does, or if none does."""
    try:
        path = resolve(checkpoint or "")
        return None if policy_class.recognises(path) else find_policy_class(path).family
    except (ValueError, OSError):
        return None


def load_policy(folder: str | Path, **settings: Any) -> VLAPolicy:
    """Load a policy that ``save_pretrained`` wrote, or a published checkpoint, with its statistics.

    Args:
        folder: local folder or hub id.
        **settings: of ``from_pretrained`` of its class. Files of OpenVLA-OFT that have neither its heads nor our
            options look like OpenVLA's: load those with ``OpenVLAOFT.from_pretrained``.

    Returns:
        The policy, in train mode as torch makes modules. None of ours has dropout or statistics of batches: after
        ``eval()``, which :func:`vla_algos.evaluate` calls itself, it acts the same up to rounding.

    Raises:
        FileNotFoundError: the folder is not a policy.
        ValueError: an unknown architecture, settings that do not fit, a truncated file, or weights that do not fit the
            configuration.
    """
    path = resolve(folder)
    return find_policy_class(path).from_pretrained(path, **settings)


def inspect_policy(folder: str | Path) -> Report:
    """Describe a checkpoint folder or hub id without reading a tensor.

    Raises:
        FileNotFoundError, ValueError: it is no checkpoint of a registered family.
    """
    path = resolve(folder)
    return find_policy_class(path).describe(path)


def outline_policy(name: str | Path, **settings: Any) -> Outline:
    """Say what a policy is made of, for its memory; allocates nothing and reads headers only.

    Args:
        name: a family, for its published sizes, or a checkpoint's folder or hub id.
        **settings: see :func:`policy_types`; ``family`` where the files of a folder do not tell.

    Raises:
        FileNotFoundError, ValueError: no such family or checkpoint, or settings that do not fit it.
    """
    chosen = {key: value for key, value in settings.items() if value is not None}
    family, folder = str(name), None
    if family not in policies:
        if "/" not in family and not Path(family).exists():
            raise unknown_name("family or folder", family, policies.names())
        folder = resolve(name)
        family = chosen.pop("family", None) or find_policy_class(folder).family
    policy_class = get_policy_class(family)
    check_settings("policy", chosen, policy_class.setting_types())
    try:
        return policy_class.outline(folder, **chosen)
    except SettingError as error:
        raise ValueError(f"policy.{error}") from error


def find_policy_class(folder: Path) -> type[VLAPolicy]:
    """Find the registered class that recognises a local folder.

    Raises:
        FileNotFoundError: the folder is not a policy.
        ValueError: no family knows it, or several do.
    """
    found: list[type[VLAPolicy]] = []
    for family in policies.names():
        try:
            policy_class = get_policy_class(family)
            if policy_class.recognises(folder):
                found.append(policy_class)
        except ImportError as error:  # of a stranger's package: it must not be in the way of the others
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
    if len(found) > 1:
        names = " and ".join(each.family for each in found)
        raise ValueError(
            f"{folder} is a checkpoint of {names}; load it with from_pretrained of the class that you mean"
        )
    if not found:
        verify_checksums(folder)
        said, config = layout.read(folder)
        kind = said or config.get("model_type")
        raise ValueError(
            f"{folder} is a checkpoint of {repr(kind) if kind else 'an unknown model'}; known are "
            f"{', '.join(policies.names())}: install the package that registers it"
        )
    return found[0]
