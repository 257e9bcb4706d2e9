"""All packages have one version, that of the distribution."""

import tomllib

from paths import ROOT

import vla_algos
import vla_common
import vla_envs
import vla_policies


def test_all_packages_have_the_version_of_the_distribution():
    """pyproject.toml takes it from vla_common; test_wheel.py builds one."""
    assert {vla_envs.__version__, vla_policies.__version__, vla_algos.__version__} == {vla_common.__version__}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "vla_common.__version__"}
