"""Policies of other processes and machines: openpi's and vla-eval's servers over a websocket."""

from vla_policies.remote.policy import RemotePolicy, RemotePolicyConfig

__all__ = ["RemotePolicy", "RemotePolicyConfig"]
