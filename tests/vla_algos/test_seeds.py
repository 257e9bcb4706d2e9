"""Several seeds, and a published rate: formulas computed another way, and ``vla-recipe compare``."""

from dataclasses import replace

import numpy as np
import pytest

from recipes.__main__ import main
from vla_algos.intervals import Estimate, independent_difference, wilson_interval
from vla_algos.results import EpisodeResult, as_lines
from vla_algos.seeds import Seeds, hierarchical_bootstrap, interquartile_mean, probability_of_improvement
from vla_envs.simulator import Episode


def rate(solved, episodes):
    return Estimate(solved / episodes, *wilson_interval(solved, episodes))


def results(rates, seed, trials=20):
    """Episodes of a task for each rate."""
    draw, found = np.random.default_rng(seed), []
    for task, chance in enumerate(rates):
        for trial in range(trials):
            solved = bool(draw.random() < chance)
            episode = Episode(task, trial, 9)
            found.append(EpisodeResult(episode, f"task-{task}", solved, solved, float(solved), 10, index=len(found)))
    return found


def seeds_of(*rates, trials=20):
    return Seeds.of({f"seed {number}": results(each, number, trials) for number, each in enumerate(rates)})


# ---- a published rate


@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    # Newcombe (1998), table II, method 10: 56/70 - 48/80, 9/10 - 3/10, 5/56 - 0/29, 0/10 - 0/20, 10/10 - 0/20.
    [
        ((48, 80), (56, 70), 0.0524, 0.3339),
        ((3, 10), (9, 10), 0.1705, 0.8090),
        ((0, 29), (5, 56), -0.0381, 0.1926),
        ((0, 20), (0, 10), -0.1611, 0.2775),
        ((0, 20), (10, 10), 0.6791, 1.0),
    ],
)
def test_the_interval_of_a_difference_is_newcombes(first, second, low, high):
    found = independent_difference(rate(*first), rate(*second))
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    turned = independent_difference(rate(*second), rate(*first))
    assert (turned.value, turned.low, turned.high) == pytest.approx((-found.value, -found.high, -found.low))


@pytest.mark.parametrize(("here", "there", "episodes"), [(0.97, 0.94, 500), (0.5, 0.3, 40), (0.1, 0.05, 100)])
def test_95_of_100_intervals_have_the_true_difference(here, there, episodes):
    draw, runs = np.random.default_rng(0), 2000
    counts = draw.binomial(episodes, [there, here], size=(runs, 2)).tolist()
    found = [independent_difference(rate(one, episodes), rate(other, episodes)) for one, other in counts]
    assert 0.935 <= np.mean([each.low <= here - there <= each.high for each in found]) <= 0.99


def write(folder, episodes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "episodes.jsonl").write_text(as_lines(episodes))
    return folder


def said(capsys, *arguments):
    assert main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("published", "episodes", "verdict"), [(97.1, 500, "below"), (9.0, 100, "above"), (52, 500, "consistent")]
)
def test_an_evaluation_is_above_below_or_consistent_with_what_was_published(
    published, episodes, verdict, tmp_path, capsys
):
    solved = [replace(each, success_once=each.index % 2 == 0) for each in results([0.5] * 5, 0)]
    solved[7] = replace(solved[7], crashed=True)
    out = said(capsys, write(tmp_path / "a", solved), "--published", published, "--episodes", episodes)
    found = independent_difference(
        Estimate(published / 100, *wilson_interval(published / 100 * episodes, episodes)), rate(50, 99)
    )
    *_, last = out.splitlines()
    assert last.endswith(f"{100 * found.value:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f}): {verdict}")
    assert "99 episodes of 5 tasks, with 95 % intervals; greedy; 1 crashed and are not counted" in out
    assert f"{published:.1f}%" in out


def test_deviations_are_said_with_it(tmp_path, capsys):
    folder = write(tmp_path / "a", results([0.5], 0))
    (folder / "config.yaml").write_text("recipe: evaluate\n")
    (folder / "run.json").write_text('{"protocol": "libero", "protocol_deviations": ["horizon 10"]}')
    assert "not the benchmark's: horizon 10" in said(capsys, folder, "--published", 97.1, "--episodes", 500)


# ---- several seeds


def test_the_interquartile_mean_is_scipys_trimmed_mean():
    stats = pytest.importorskip("scipy.stats", reason="scipy comes with a simulator")
    draw = np.random.default_rng(0)
    for shape in [(1, 1), (3, 1), (3, 10), (5, 7), (4, 50)]:
        scores = draw.random(shape)
        assert interquartile_mean(scores) == pytest.approx(stats.trim_mean(scores, 0.25, axis=None))
    assert interquartile_mean(np.array([[0.0, 0.5, 0.7, 1000.0]])) == pytest.approx(0.6)


def test_the_probability_of_improvement_is_counted_pair_by_pair():
    stats = pytest.importorskip("scipy.stats", reason="scipy comes with a simulator")
    draw = np.random.default_rng(1)
    first, second = draw.integers(5, size=(3, 8)) / 4, draw.integers(6, size=(5, 8)) / 4
    counted, whitney = [], []
    for task in range(8):
        x, y = first[:, task], second[:, task]
        counted.append(np.mean([1.0 if b > a else 0.5 if b == a else 0.0 for a in x for b in y]))
        whitney.append(stats.mannwhitneyu(y, x, alternative="greater").statistic / 15)  # as rliable does it
    assert probability_of_improvement(first, second) == pytest.approx(np.mean(counted))
    assert probability_of_improvement(first, second) == pytest.approx(np.mean(whitney))
    assert probability_of_improvement(first, first) == 0.5
    assert probability_of_improvement(first, second) + probability_of_improvement(second, first) == pytest.approx(1)


def test_results_are_counted_by_seed_and_task():
    solved = [replace(each, success_once=each.index % 4 == 0) for each in results([0.5] * 3, 0)]
    crashed = [replace(each, crashed=each.index in (0, 1, 59)) for each in solved]
    found = Seeds.of({"a": solved, "b": crashed[::-1]})
    assert found.episodes.tolist() == [[20, 20, 20], [18, 20, 19]]
    assert found.solved.tolist() == [[5, 5, 5], [4, 5, 5]]
    assert found.pooled().scores.tolist() == [[15 / 60], [14 / 57]]
    with pytest.raises(ValueError, match="b has no result of task-2; take evaluations"):
        Seeds.of({"a": solved, "b": solved[:40]})


def test_the_bootstrap_is_that_of_seeds_then_episodes():
    """Drawn here episode by episode, from the very outcomes."""
    rates = [[0.9, 0.3], [0.6, 0.1], [0.8, 0.5]]
    outcomes = [np.array([each.success_once for each in results(rate, seed)]) for seed, rate in enumerate(rates)]
    draw, drawn = np.random.default_rng(3), []
    for _ in range(4000):
        chosen = [outcomes[seed] for seed in draw.integers(3, size=3)]
        drawn.append(np.mean([each[draw.integers(40, size=40)].mean() for each in chosen]))
    low, high = np.quantile(drawn, [0.025, 0.975])
    pooled = seeds_of(*rates).pooled()
    found = hierarchical_bootstrap(np.mean, pooled)
    assert found.value == pytest.approx(np.mean(outcomes))
    assert (found.low, found.high) == (pytest.approx(low, abs=0.012), pytest.approx(high, abs=0.012))
    assert found == hierarchical_bootstrap(np.mean, pooled), "the same input is the same output"


def test_seeds_that_differ_make_the_interval_wider_than_their_episodes_do():
    alike, unlike = seeds_of([0.5], [0.5], [0.5], trials=400), seeds_of([0.2], [0.5], [0.8], trials=400)
    widths = [found.high - found.low for found in (hierarchical_bootstrap(np.mean, each) for each in (alike, unlike))]
    assert widths[0] < 0.12
    assert widths[1] > 0.4


@pytest.mark.parametrize(("solved", "low", "high"), [(0, 0.0, 0.31), (5, 0.69, 1.0)])
def test_seeds_that_solve_all_or_nothing_have_an_interval_too(solved, low, high):
    found = hierarchical_bootstrap(np.mean, Seeds(np.full((2, 1), 5), np.full((2, 1), solved)))
    assert low <= found.low <= found.value == solved / 5 <= found.high <= high
    assert found.high - found.low > 0.15  # as one run of 10 episodes has, about


@pytest.mark.parametrize(
    "statistic", [interquartile_mean, lambda scores: probability_of_improvement(scores, scores + 0.1)]
)
def test_what_is_no_mean_lies_within_its_interval(statistic):
    """Of tasks that are nearly always solved some are drawn below: their middle half alone would fall."""
    some = np.random.default_rng(0).uniform(0.3, 0.95, 15)
    found = hierarchical_bootstrap(statistic, seeds_of(*3 * [[0.995] * 35 + [*some]], trials=10))
    assert 0 <= found.low < found.value <= found.high <= 1


def test_an_evaluation_that_is_not_finished_is_no_result(tmp_path, capsys):
    some = [each for each in results([0.5], 0) if each.index % 3]
    folders = [write(tmp_path / "a", some), write(tmp_path / "b", results([0.5], 1))]
    third, begun = write(tmp_path / "c", results([0.5], 2)), write(tmp_path / "d", results([0.5], 3)[:5])
    (begun / "evaluation.json").write_text("{}")  # evaluate.py has told of no result yet
    published = ["--published", 50, "--episodes", 9]
    for arguments in ([folders[0], *published], [third, "--with", *folders], [begun, *published]):
        assert main(["compare", *map(str, arguments)]) == 2
        assert "is not finished, and solved episodes end first" in capsys.readouterr().err
    assert f"{folders[0]} is not finished" in said(capsys, *folders)


def test_compare_of_several_seeds(tmp_path, capsys):
    a = [write(tmp_path / f"a{seed}", results([0.1, 0.3, 0.5, 0.7], seed)) for seed in range(3)]
    b = [write(tmp_path / f"b{seed}", results([0.3, 0.5, 0.8, 0.9], 10 + seed)) for seed in range(2)]
    out = said(capsys, *a, "--with", *b)
    first, second = (
        Seeds.of({str(number): results(rates, start + number) for number in range(seeds)})
        for rates, start, seeds in (([0.1, 0.3, 0.5, 0.7], 0, 3), ([0.3, 0.5, 0.8, 0.9], 10, 2))
    )
    mean, middle, better = out.splitlines()[-3:]
    assert f"{100 * first.scores.mean():.1f}% (" in mean
    assert f"  {100 * (second.scores.mean() - first.scores.mean()):+.1f} (" in mean
    assert f"{100 * interquartile_mean(second.scores):.1f}% (" in middle
    assert f"{100 * probability_of_improvement(first.scores, second.scores):.1f}% (" in better
    assert "400 episodes of 4 tasks, with 95 % intervals; greedy" in out
    assert f"{a[0]} {100 * first.scores[0].mean():.1f}%" in out
    assert out == said(capsys, *a, "--with", *b)
    pooled = hierarchical_bootstrap(np.mean, first.pooled())
    published = said(capsys, *a, "--published", 10, "--episodes", 500)
    assert f"here        {100 * pooled.value:.1f}% ({100 * pooled.low:.1f} to {100 * pooled.high:.1f})" in published
    assert published.endswith("above\n")


def test_settings_of_seeds_that_differ_are_said_once(tmp_path, capsys):
    a = [write(tmp_path / f"a{seed}", results([0.5], seed)) for seed in range(3)]
    for number, folder in enumerate(a):
        (folder / "config.yaml").write_text(f'{{"env": {{"id": "toy", "image_size": {64 if number else 32}}}}}')
    assert said(capsys, *a, "--published", 97, "--episodes", 9).count("differs: env.image_size: 32 and 64") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "a --published 0.97 --episodes 500",
            "--published 0.97 is no percentage of 1 to 100, or 0; type --published 97",
        ),
        (
            "a --published 101 --episodes 500",
            "--published 101 is no percentage of 1 to 100, or 0; type --published 97.1",
        ),
        ("a --published -1 --episodes 500", "--published -1 is no percentage"),
        ("a --published nan --episodes 500", "must be a finite number"),
        ("a --published 97 --episodes 0", "episodes=0: must be greater than or equal to 1"),
        ("a --published 97", "type: --published 97.1 --episodes 500"),
        ("a --episodes 500", "type: --published 97.1 --episodes 500"),
        ("a --published 97 --episodes 500 --with b", "--with: not allowed with argument --published"),
        ("a --published 97 --episodes 500 --mean-of x", "--mean-of: not allowed with argument --published"),
        ("empty --published 97 --episodes 500", "empty has no results of episodes"),
        ("nowhere --published 97 --episodes 500", "nowhere: there is no such file or folder"),
        ("a a/ --published 97 --episodes 500", "is there twice; type each seed once"),
        ("a b c", "which are B? type: vla-recipe compare A1 A2 --with B1 B2"),
        ("a --with b", "type: vla-recipe compare a b"),
        ("a b --with a", "is there twice; type each seed once"),
        ("a b --with c", "c has no result of task-1; take evaluations of the same env.id"),
        ("a b/episodes.jsonl --published 9 --episodes 9", "type folders alone, or .jsonl files alone"),
        ("crashed --published 9 --episodes 9", "crashed has no result of task-0"),
    ],
)
def test_a_wrong_comparison_is_one_line(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, rates in {"a": [0.5, 0.5], "b": [0.5, 0.5], "c": [0.5]}.items():
        write(tmp_path / name, results(rates, 0))
    write(tmp_path / "crashed", [replace(each, crashed=True) for each in results([0.5], 0)])
    try:
        status = main(["compare", *arguments.split()])
    except SystemExit as left:
        status = left.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
