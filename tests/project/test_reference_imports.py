"""The pages of the API reference say from where each name is imported; so it is."""

import importlib
import re

import pytest
from paths import ROOT

PAGES = ("vla_common", "vla_envs", "vla_policies", "vla_algos")
ENTRY = re.compile(r"^::: ([\w.]+)\n(?:    options: \{(.*)\}\n)?", re.MULTILINE)


def find(path):
    """A module, or what a module has."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("page", PAGES)
def test_names_are_imported_from_where_the_page_says(page):
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text() + "\n"
    entries = ENTRY.findall(text)
    assert len(entries) == text.count("\n::: ") > 0
    elsewhere = []
    for path, options in entries:
        found = find(path)  # with its module in front: from there
        if "show_root_full_path: true" in options:
            continue
        place = "vla_algos.run" if path.startswith("vla_algos.run.") else page
        if getattr(importlib.import_module(place), path.rpartition(".")[2], None) is not found:
            elsewhere.append(f"{path} is not imported from {place}")
    assert not elsewhere
