"""Two evaluations of the same episodes: differences with intervals, in Python and as ``vla-recipe compare``."""

import json
from dataclasses import replace

import numpy as np
import pytest

from recipes.__main__ import main
from vla_algos.comparison import compare
from vla_algos.intervals import Estimate, mean_of_estimates, paired_difference
from vla_algos.results import EpisodeResult, as_lines
from vla_algos.run.comparing import before_and_after
from vla_envs.simulator import Episode

GROUPS = {"easy": 0.9, "medium": 0.5, "hard": 0.2}


def pairs_of(both, first_alone, second_alone, neither):
    return (
        [(True, True)] * both
        + [(True, False)] * first_alone
        + [(False, True)] * second_alone
        + [(False, False)] * neither
    )


def results(seed, gain=0.0, trials=20, tasks=3):
    """Episodes of tasks in groups, each solved at the rate of its group and ``gain``."""
    draw = np.random.default_rng(seed)
    found = []
    for group, rate in GROUPS.items():
        for task in range(tasks):
            for trial in range(trials):
                solved = bool(draw.random() < rate + gain)
                episode = Episode(len(found) // trials, trial, 9)
                result = EpisodeResult(episode, f"{group}-{task}", solved, solved, float(solved), 10, group=group)
                found.append(replace(result, index=len(found)))
    return found


# ---- the formulas


def test_the_interval_is_that_of_agresti_and_min():
    # Agresti (2013), table 11.1 (approval of the prime minister, 1600 people): 794, 150, 86, 570. The plain interval is
    # -0.040 +- 1.96 x 0.0095 = -0.059 to -0.021; the adjusted one is the same to three digits.
    found = paired_difference(pairs_of(794, 150, 86, 570))
    assert found.value == pytest.approx(-0.04, abs=1e-9)
    assert (found.low, found.high) == (pytest.approx(-0.0586, abs=5e-4), pytest.approx(-0.0213, abs=5e-4))


@pytest.mark.parametrize("outcome", [(True, True), (False, False), (False, True)])
def test_ten_pairs_that_went_alike_are_not_certainty(outcome):
    found = paired_difference([outcome] * 10)
    assert found.value == outcome[1] - outcome[0]
    assert found.high - found.low > 0.2
    assert -1 <= found.low < found.high <= 1


def test_no_pairs():
    found = paired_difference([])
    assert np.isnan(found.value)
    assert (found.low, found.high) == (-1, 1)


def test_what_both_solve_makes_the_interval_narrower():
    """As pairs the difference is known better than from two evaluations of other episodes."""
    paired, crossed = pairs_of(45, 5, 15, 35), pairs_of(30, 20, 30, 20)  # 50 % and 60 % in both
    widths = [found.high - found.low for found in map(paired_difference, (paired, crossed))]
    assert paired_difference(paired).value == paired_difference(crossed).value == pytest.approx(0.1)
    assert widths[0] < 0.7 * widths[1]


def test_the_intervals_are_those_of_a_bootstrap():
    """Episodes are drawn again within their group, 4000 times."""
    draw = np.random.default_rng(0)
    groups = [
        [(bool(one), bool(one) != bool(draw.random() < changed)) for one in draw.random(number) < rate]
        for number, rate, changed in ((280, 0.6, 0.2), (110, 0.4, 0.25), (60, 0.3, 0.3), (50, 0.2, 0.2))
    ]
    arrays = [np.array([second - first for first, second in np.array(group).astype(int)]) for group in groups]
    drawn = [array[draw.integers(len(array), size=(4000, len(array)))].mean(1) for array in arrays]
    low, high = np.quantile(drawn[0], [0.025, 0.975])
    alone = paired_difference(groups[0])
    assert (alone.low, alone.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))
    low, high = np.quantile(np.mean(drawn, 0), [0.025, 0.975])
    mean = mean_of_estimates([paired_difference(group) for group in groups])
    assert mean.value == pytest.approx(np.mean([array.mean() for array in arrays]))
    assert (mean.low, mean.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))


@pytest.mark.parametrize(
    "rates",  # of both, first alone, second alone, neither
    [
        [(0.3, 0.1, 0.2, 0.4)] * 4,
        [(0.9, 0.02, 0.05, 0.03), (0.4, 0.1, 0.2, 0.3), (0.2, 0.05, 0.2, 0.55), (0.02, 0.01, 0.07, 0.9)],
    ],
)
def test_95_of_100_intervals_have_the_true_difference(rates):
    draw, numbers, runs = np.random.default_rng(1), (280, 110, 60, 50), 1000
    truth = np.mean([second - first for _, first, second, _ in rates])
    hits = 0
    for _ in range(runs):
        counts = [draw.multinomial(number, each) for number, each in zip(numbers, rates, strict=True)]
        mean = mean_of_estimates([paired_difference(pairs_of(*each)) for each in counts])
        hits += mean.low <= truth <= mean.high
    assert 0.93 <= hits / runs <= 0.985


def test_the_mean_of_symmetric_intervals_is_the_stratified_one():
    found = mean_of_estimates([Estimate(0.1, 0.07, 0.13), Estimate(0.3, 0.26, 0.34)])
    assert (found.value, found.low, found.high) == (
        pytest.approx(0.2),
        pytest.approx(0.2 - 0.05 / 2),
        pytest.approx(0.2 + 0.05 / 2),
    )


# ---- the pairs


def test_episodes_are_paired_whatever_their_order_and_number():
    first, second = results(0), results(1, gain=0.1)
    # As a run of fewer tasks in another order has them: other indices and task ids.
    fewer = [
        replace(result, index=100 - place, episode=replace(result.episode, task_id=7))
        for place, result in enumerate(second[30:90])
    ]
    found = compare(first, fewer)
    assert [(one.task, one.episode.trial_id) for one, _ in found.pairs] == [
        (result.task, result.episode.trial_id) for result in first[30:90]
    ]
    assert all((one.task, one.episode.trial_id) == (two.task, two.episode.trial_id) for one, two in found.pairs)
    assert (found.first_alone, found.second_alone, found.crashed) == (120, 0, 0)
    assert "not compared: 120 episodes of before alone, 0 of after" in found.table("before", "after")


def test_repeated_episodes_are_paired_run_by_run():
    once = results(0)[:3]
    repeated = [replace(result, index=place) for place, result in enumerate(once * 2)]
    found = compare(repeated, [replace(result, success_once=not result.success_once) for result in repeated])
    assert len(found.pairs) == 6
    assert all(one.index == other.index for one, other in found.pairs)
    assert compare(repeated, once).first_alone == 3


def test_crashed_episodes_are_no_pairs_and_are_counted():
    first, second = results(0), results(1)
    first[3], second[5] = replace(first[3], crashed=True), replace(second[5], crashed=True)
    found = compare(first, second)
    assert (len(found.pairs), found.crashed) == (178, 2)
    assert "not compared: 2 episodes that crashed" in found.table("a", "b")


def test_rows_per_task_group_and_mean():
    first, second = results(0), results(1, gain=0.2)
    found = compare(first, second, ["easy", "hard"])
    gains = [row.difference.value for row in found.by_task().values()]
    assert gains == sorted(gains, reverse=True)
    groups = found.by_group()
    assert found.mean.difference.value == pytest.approx(
        (groups["easy"].difference.value + groups["hard"].difference.value) / 2
    )
    assert found.mean.episodes == 120
    metrics = found.metrics("eval_blank_images")
    assert metrics["eval_blank_images/mean/difference"] == found.mean.difference.value
    low, high = metrics["eval_blank_images/group/hard/difference/interval"]
    assert low < metrics["eval_blank_images/group/hard/difference"] < high
    header, *lines = found.table("before", "after", tasks=True).splitlines()
    assert len({len(line) for line in [header, *lines]}) == 1
    assert lines[-1].startswith("mean of easy, hard")
    assert len(lines) == 9 + 3 + 1 + 1
    assert "task" in found.table("a", "b").splitlines()[0]


def test_what_cannot_be_compared_is_said():
    first = results(0)
    other = [replace(result, episode=replace(result.episode, seed=1)) for result in first]
    with pytest.raises(ValueError, match=r"share no episode: of 180 and 180 .*easy-0 trial 0 seed 9.*eval.seed"):
        compare(first, other)
    with pytest.raises(ValueError, match="unknown group in mean_of 'hrad'; did you mean hard"):
        compare(first, first, ["hrad"])
    partly = compare(first, [result for result in first if result.group != "hard"], ["easy", "hard"])
    assert partly.mean is None
    assert "mean of easy, hard: none" in partly.table("a", "b")


# ---- folders


def write(path, episodes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_lines(episodes))


def run_of(folder, seed, recipe="ppo", **settings):
    """A training run's folder with three evaluations, sampled ones too."""
    for number, iteration in enumerate((0, 900, 10000)):  # which sort otherwise as text
        write(folder / f"evaluations/iteration_{iteration:04d}/eval.jsonl", results(seed + number, 0.05 * number))
    for iteration, gain in ((0, 0.0), (10000, 0.3)):
        write(folder / f"evaluations/iteration_{iteration:04d}/eval_sampled.jsonl", results(seed + 50, gain))
    env = {"id": "metaworld/MT50", "num_envs": 4, "image_size": 64} | settings
    config = {"recipe": recipe, "env": env, "eval": {"mean_of": ["easy", "hard"]}}
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder


def said(capsys, *arguments):
    assert main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_compare_of_one_run_is_its_first_and_its_last_evaluation(tmp_path, capsys):
    out = said(capsys, run_of(tmp_path / "run", 0))
    greedy, sampled = out.split("\n\n")
    assert "after - before, paired over 180 episodes; greedy; before iteration_0000, after iteration_10000" in greedy
    assert "; sampled;" in sampled
    expected = compare(results(0), results(2, 0.1), ["easy", "hard"])
    assert expected.table("before", "after", tasks=True) in greedy
    assert "mean of easy, hard" in greedy  # as the run's settings have it


def test_compare_of_two_runs_is_their_last_evaluations(tmp_path, capsys):
    first = run_of(tmp_path / "a", 0)
    second = run_of(tmp_path / "b", 10, image_size=128, num_envs=16, cache_gigabytes=2)
    out = said(capsys, first, second, "--mean-of", "easy,medium,hard")
    assert compare(results(2, 0.1), results(12, 0.1), list(GROUPS)).table("A", "B", tasks=True) in out
    assert "differs: env.image_size: 64 and 128" in out
    assert "num_envs" not in out
    assert "cache_gigabytes" not in out  # which no policy sees
    assert said(capsys, first / "evaluations/iteration_0000", second).count("B - A, paired over 180") == 2
    file = first / "evaluations/iteration_0000/eval.jsonl"
    assert "B - A, paired over 180 episodes" in said(capsys, file, second / "evaluations/iteration_0900")


def test_protocols_that_differ_are_said(tmp_path, capsys):
    first, second = run_of(tmp_path / "a", 0), run_of(tmp_path / "b", 10)
    (first / "run.json").write_text(json.dumps({"protocol": "openvla", "protocol_deviations": ["horizon 10"]}))
    out = said(capsys, first, second)
    assert "differs: protocol: openvla and none" in out
    assert "differs: protocol_deviations: ['horizon 10'] and none" in out


def test_compare_of_an_evaluation_is_that_with_its_ablations(tmp_path, capsys):
    write(tmp_path / "episodes.jsonl", results(0))
    write(tmp_path / "episodes_other_trial.jsonl", results(1, -0.1))
    write(tmp_path / "episodes_blank_images.jsonl", results(2, -0.1))
    write(tmp_path / "episodes_blank_images_rank1.jsonl", results(2, -0.1)[:1])
    write(tmp_path / "episodes_rank1.jsonl", results(0)[:1])
    out = said(capsys, tmp_path)
    assert out.count("paired over 180 episodes") == 2
    assert "other_trial - normal" in out
    assert "blank_images - normal" in out
    run = run_of(tmp_path / "run", 5)
    (tmp_path / "config.yaml").write_text("recipe: evaluate\ngreedy: false\n")
    assert compare(results(55, 0.3), results(0)).table("A", "B", tasks=True) in said(
        capsys, run, tmp_path, "--mean-of", ""
    ), "a sampled evaluation is compared with the sampled one"


def test_an_evaluation_that_was_broken_off_counts_as_far_as_it_came(tmp_path, capsys):
    write(tmp_path / "a/episodes.jsonl", results(0))
    write(tmp_path / "b/episodes_rank1.jsonl", results(1)[:30])
    with open(tmp_path / "b/episodes_rank1.jsonl", "a") as file:
        file.write('{"index": 31, "to')
    assert "not compared: 150 episodes of A alone, 0 of B" in said(capsys, tmp_path / "a", tmp_path / "b")


def test_an_evaluation_of_a_training_that_was_broken_off_is_no_result(tmp_path, capsys):
    run = run_of(tmp_path / "run", 0)
    lines = [{"step": step, "eval/num_episodes": 180.0} for step in (0, 900)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(run / "evaluations/iteration_10000/eval.jsonl", results(0)[:2])  # no gap: the first two have ended
    (run / "evaluations/iteration_0900_copy").mkdir()
    assert "before iteration_0000, after iteration_0900" in said(capsys, run)
    of_run = run / "evaluations"
    typed = said(capsys, of_run / "iteration_0900", of_run / "iteration_10000")
    assert f"{of_run / 'iteration_10000'} is not finished" in typed
    assert typed.count("is not finished") == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: ["nowhere"], "nowhere: there is no such file or folder"),
        (lambda folder: [folder], "has no results of episodes: neither episodes.jsonl nor evaluations/"),
        (lambda folder: (write(folder / "episodes.jsonl", results(0)), [folder])[1], "has one evaluation; with what?"),
        (
            lambda folder: ((folder / "x.jsonl").write_text('{"loss": 1}\n'), [folder / "x.jsonl"] * 2)[1],
            "x.jsonl: line 1 is no result of an episode",
        ),
        (
            lambda folder: ((folder / "x.jsonl").write_text("torn"), [folder / "x.jsonl"] * 2)[1],
            "x.jsonl has no result of an episode",
        ),
        (
            lambda folder: (write(folder / "x.jsonl", results(0)), [folder / "x.jsonl"] * 2 + ["--mean-of", "hrad"])[1],
            "unknown group in mean_of 'hrad'; did you mean hard",
        ),
    ],
)
def test_a_wrong_comparison_is_one_line(make, message, tmp_path, capsys):
    arguments = make(tmp_path)
    assert main(["compare", *map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_finished_run_says_before_and_after_or_why_not(tmp_path):
    run = run_of(tmp_path / "run", 0)
    greedy, sampled = before_and_after(run, ["easy", "hard"])
    assert compare(results(0), results(2, 0.1), ["easy", "hard"]).table("before", "after") in greedy
    assert "sampled" in sampled
    (run / "evaluations/iteration_0000/eval.jsonl").write_text("")
    (line,) = before_and_after(run, [])
    assert line.startswith("before and after are not compared: ")
    assert before_and_after(tmp_path, []) == []
