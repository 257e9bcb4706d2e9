"""docs/results.md has every number that an experiment expects of a guide, and names no experiment that is not there."""

import re

import pytest
from paths import CONF, ROOT

PAGE = (ROOT / "docs" / "results.md").read_text()
TABLES, RAN = PAGE.split("## What ran here")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLES.splitlines() if line.startswith("| ")]
EXPERIMENTS = {path.stem: path.read_text() for path in sorted((CONF / "experiment").glob("*.yaml"))}
PREFIXES = ("calvin_", "libero_", "maniskill_", "metaworld_", "robotwin_")


def expected(head):
    """What the head of an experiment says of the guide, as text."""
    text = re.split(r"^recipe:", head, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.search(r"Result to expect[:,](.*)", text.replace("\n#", "\n"), re.DOTALL)
    return found[1].strip() if found else ""


PROMISED = {name: re.findall(r"([\d.]+) -> ([\d.]+)", expected(head)) for name, head in EXPERIMENTS.items()}
PROMISED = {name: numbers[0] for name, numbers in PROMISED.items() if numbers}


def test_every_experiment_that_is_named_exists():
    named = {each for each in re.findall(r"`(\w+)`", PAGE) if each.startswith(PREFIXES)}
    assert named <= EXPERIMENTS.keys()
    assert len(named) > 50


def test_there_is_something_to_look_for():
    assert len(PROMISED) > 35


@pytest.mark.parametrize("name", PROMISED)
def test_a_guides_number_stands_beside_its_experiment(name):
    before, after = PROMISED[name]
    rows = [row for row in ROWS if f"`{name}`" in row]
    assert any(f"{before} → {after}" in row for row in rows), f"{name}: {before} → {after} is in none of {rows}"


def test_every_experiment_that_trains_a_published_policy_has_a_row():
    large = [name for name in EXPERIMENTS if not name.endswith(("_small", "_smallflow")) and "_evaluate_" not in name]
    rows = {name for row in ROWS for name in row}
    said = {name for name in large if f"`{name}`" in rows or f"`{name}`" in TABLES}
    assert said == set(large)


def test_the_tables_of_evaluations_are_there():
    """Rows of numbers that heads of evaluations have as tables."""
    for name in ("calvin_evaluate_d_d_openpi", "robotwin_evaluate_openvlaoft", "robotwin_evaluate_openpi"):
        for line in EXPERIMENTS[name].splitlines():
            if "|" in line and re.search(r"\d", line):
                for number in re.findall(r"\d+\.\d+", line):
                    assert number in TABLES, f"{name}: {number}"


def test_what_was_not_run_says_so():
    assert sum("ours" in row for row in ROWS) == 6
    place = None
    for row in ROWS:
        if "ours" in row:
            place = row.index("ours")
            continue
        assert row[place] in ("not run", "not here") or re.match(r"\[?\d", row[place]), row


def test_what_ran_here_is_linked():
    for page in re.findall(r"\]\((recipes/[\w.-]+)\)", RAN):
        assert (ROOT / "docs" / page).is_file()
    assert not re.findall(r"\]\(recipes/", TABLES), "runs of other policies fill no row of the guides"
