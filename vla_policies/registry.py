"""Policies by the name of their family: ours and those of any installed package, made, loaded and inspected."""

import warnings
from pathlib import Path
from typing import Any, Optional

from vla_common.checksums import verify_checksums
from vla_common.errors import unknown_name
from vla_common.registry import policies
from vla_common.schema import EnvironmentShape
from vla_common.settings import check_settings
from vla_policies.checkpoint import layout
from vla_policies.checkpoint.hub import resolve
from vla_policies.checkpoint.report import Report
from vla_policies.checkpoint.settings import SettingError
from vla_policies.policy import Sharding, VLAPolicy, given_shard


def register_policy(name: str, policy_class: type[VLAPolicy]) -> None:
    """Add a family for this process; an entry point of the group ``vla_torchrl.policies`` adds one permanently.

    TypeError: not a class of policies. ValueError: the name is taken, or the class has another ``family``.
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
    """Find the class of a family; ValueError offers the nearest names, ImportError if it cannot be imported."""
    if family not in policies:
        raise unknown_name("policy.family", str(family), policies.names())
    found = policies.get(family)
    if not (isinstance(found, type) and issubclass(found, VLAPolicy) and found.family == family):
        raise ImportError(f"{family!r} of {policies.group} must be a VLAPolicy of that family, not {found!r}")
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
        checkpoint: folder, or ``hf:NAME``; FileNotFoundError if there is none.
        shard: shards it over processes before its weights are read, see
            :meth:`vla_policies.pretrained.PretrainedPolicy.from_pretrained`.
        **settings: see :func:`policy_types`; ``None`` leaves one to the class, or to the checkpoint.

    Raises:
        ValueError: settings or an environment that do not fit it; names a setting as recipes type it.
    """
    policy_class = get_policy_class(family)
    chosen = {name: value for name, value in settings.items() if value is not None}
    check_settings("policy", chosen, policy_class.setting_types())
    chosen |= given_shard(shard)
    try:
        if checkpoint and not policy_class.needs_checkpoint:
            path = resolve(checkpoint)
            found = policy_class if policy_class.recognises(path) else find_policy_class(path)
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


def _other_family(policy_class: type[VLAPolicy], checkpoint: str | Path | None) -> str | None:
    """Return the family of a checkpoint that a class does not recognise; ``None`` if it does, or if none does."""
    try:
        path = resolve(checkpoint or "")
        return None if policy_class.recognises(path) else find_policy_class(path).family
    except (ValueError, OSError):
        return None


def load_policy(folder: str | Path, family: str | None = None, **settings: Any) -> VLAPolicy:
    """Load a policy that ``save_pretrained`` wrote, or a published checkpoint, with its statistics.

    Args:
        folder: local folder, or ``hf:NAME``; FileNotFoundError if it is not a policy.
        family: where files do not tell: OpenVLA-OFT's without its heads or our options look like OpenVLA's.
        **settings: of ``from_pretrained`` of its class.

    Returns:
        The policy, in train mode as torch makes modules; in ``eval()`` ours act the same up to rounding.

    Raises:
        ValueError: an unknown architecture, settings or weights that do not fit, or a truncated file.
    """
    path = resolve(folder)
    policy = (get_policy_class(family) if family else find_policy_class(path)).from_pretrained(path, **settings)
    policy.loaded_from = path
    return policy


def inspect_policy(folder: str | Path) -> Report:
    """Describe a checkpoint folder, or ``hf:NAME``, without reading a tensor; errors of :func:`find_policy_class`."""
    path = resolve(folder)
    return find_policy_class(path).describe(path)


def meta_policy(name: str | Path, **settings: Any) -> VLAPolicy:
    """Make the networks of a policy on the meta device, for its memory; reads headers only.

    ``name`` is a family, for its published sizes, or a checkpoint's folder, or ``hf:NAME``. Of the settings of
    :func:`policy_types`, ``family`` is for a folder whose files do not tell.
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
        return policy_class.meta_policy(folder, **chosen)
    except SettingError as error:
        raise ValueError(f"policy.{error}") from error


def find_policy_class(folder: Path) -> type[VLAPolicy]:
    """Find the registered class that recognises a local folder, without reading a tensor.

    FileNotFoundError: the folder is not a policy. ValueError: no family knows it, or several do.
    """
    found: list[type[VLAPolicy]] = []
    for family in policies.names():
        try:
            policy_class = get_policy_class(family)
            if policy_class.recognises(folder):
                found.append(policy_class)
        except ImportError as error:  # of a package from outside, which must not stop the others
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
    if len(found) > 1:
        names = " and ".join(each.family for each in found)
        raise ValueError(f"{folder} is a checkpoint of {names}; load it with from_pretrained of one of them")
    if not found:
        verify_checksums(folder)
        said, config = layout.read(folder)
        kind = said or config.get("model_type") or config.get("type")  # LeRobot's word
        raise ValueError(
            f"{folder} is a checkpoint of {repr(kind) if kind else 'an unknown model'}; known are "
            f"{', '.join(policies.names())}: install the package that registers it"
        )
    return found[0]
