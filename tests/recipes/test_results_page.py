"""docs/results.md has a row for every experiment of a published policy, and names none that is not there."""

import re

from paths import CONF, ROOT

from vla_common.experiments import find_experiments

PAGE = (ROOT / "docs" / "results.md").read_text()
TABLES, RAN = PAGE.split("## What ran here")
OF_GUIDES = TABLES.partition("## Hardware")[0].splitlines()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in OF_GUIDES if line.startswith("| ")]
EXPERIMENTS = find_experiments(CONF)
PREFIXES = ("calvin_", "libero_", "maniskill_", "metaworld_", "robotwin_")


def test_every_experiment_that_is_named_exists():
    named = {each for each in re.findall(r"`(\w+)`", PAGE) if each.startswith(PREFIXES)}
    assert named <= EXPERIMENTS.keys()
    assert len(named) > 40


def test_every_experiment_that_trains_a_published_policy_has_a_row():
    tables = {each.file for each in EXPERIMENTS.values() if each.suite}
    named = {name for name, each in EXPERIMENTS.items() if each.suite or each.file not in tables}
    large = {name for name in named if not name.endswith(("_small", "_smallflow"))}
    assert {name for name in large if f"`{name}`" in TABLES.partition("## Hardware")[0]} == large


def test_the_mean_of_plate25_is_over_all_sixteen_tasks():
    sizes = (1, 5, 7, 3)  # of training's setting, Vision, Semantic and Execution
    found = [row for row in ROWS if re.fullmatch(r"OpenVLA(-OFT)?", row[0]) and re.fullmatch(r"[\d.]+", row[6])]
    last = [[float(cell.split()[-1]) for cell in row[2:7]] for row in found]
    means = [sum(size * number for size, number in zip(sizes, row[:4], strict=True)) / 16 for row in last]
    assert [abs(mean - row[4]) < 0.01 for mean, row in zip(means, last, strict=True)] == [False] + [True] * 6
    assert round(means[0], 2) == 39.02


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
