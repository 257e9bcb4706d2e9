"""Modules of version 0.1's first layout: their old names are imported for one more version, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "vla_envs.errors": "vla_common.errors",
    "vla_envs.options": "vla_common.validation",
    "vla_envs.worker": "vla_envs.workers.worker",
    "vla_envs.shared_memory": "vla_envs.workers.shared_memory",
    "vla_envs.graphics": "vla_envs.rendering.egl",
    "vla_envs.mujoco_rendering": "vla_envs.rendering.mujoco",
    "vla_policies.adapters": "vla_policies.processing.adapters",
    "vla_policies.checkpoints": "vla_policies.registry",
    "vla_policies.film": "vla_policies.openvla.film",
    "vla_policies.flow_policy": "vla_policies.flow.policy",
    "vla_policies.gemma": "vla_policies.nn.gemma",
    "vla_policies.hub": "vla_policies.checkpoint.hub",
    "vla_policies.images": "vla_policies.processing.images",
    "vla_policies.llama": "vla_policies.nn.llama",
    "vla_policies.lora": "vla_policies.checkpoint.lora",
    "vla_policies.normalization": "vla_policies.processing.normalization",
    "vla_policies.oft_heads": "vla_policies.openvla.heads",
    "vla_policies.openvla_folder": "vla_policies.openvla.folder",
    "vla_policies.openvla_oft": "vla_policies.openvla.oft",
    "vla_policies.pi0_folder": "vla_policies.pi0.folder",
    "vla_policies.pi0_model": "vla_policies.pi0.model",
    "vla_policies.pi0_prefix": "vla_policies.pi0.prefix",
    "vla_policies.pi0_presets": "vla_policies.pi0.presets",
    "vla_policies.pi0_prompts": "vla_policies.pi0.prompts",
    "vla_policies.prismatic": "vla_policies.openvla.model",
    "vla_policies.prismatic_policy": "vla_policies.openvla.base",
    "vla_policies.prompts": "vla_policies.openvla.prompts",
    "vla_policies.sampling": "vla_policies.processing.sampling",
    "vla_policies.saved_settings": "vla_policies.checkpoint.settings",
    "vla_policies.siglip": "vla_policies.nn.siglip",
    "vla_policies.small_flow": "vla_policies.small.flow_policy",
    "vla_policies.text": "vla_policies.small.text",
    "vla_policies.tokens": "vla_policies.processing.action_tokens",
    "vla_policies.value_head": "vla_policies.nn.value_head",
    "vla_policies.vision": "vla_policies.nn.dino_siglip",
    "vla_policies.weights": "vla_policies.checkpoint.weights",
    "vla_algos.distributed": "vla_algos.parallel",
    "vla_algos.resume": "vla_algos.run.resume",
    "vla_algos.checkpoints": "vla_algos.run.checkpoints",
    "vla_algos.loggers": "vla_algos.run.logging",
    "vla_algos.launch": "vla_algos.run.launch",
    "vla_algos.record": "vla_algos.run.provenance",
}


class MovedModules(MetaPathFinder, Loader):
    """Finds a module by its old name and returns the one that has its content now."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a specification for the names in :data:`MOVED`, and for nothing else."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its present name."""
        new = MOVED[spec.name]
        warnings.warn(
            f"{spec.name} is called {new} now; the old name goes with the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        module = importlib.import_module(new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing but undo what the import system has written on the module: it has been executed already."""
        module.__spec__, module.__loader__ = self._spec, None if self._spec is None else self._spec.loader


def find_moved_modules() -> None:
    """Let this process import modules by their old names; called by the packages that have moved some."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
