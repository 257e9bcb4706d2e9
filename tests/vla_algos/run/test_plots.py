"""The curves of a page: which there are, and of what."""

import math

import pytest

from vla_algos.intervals import wilson_interval
from vla_algos.run.plots import Plot, plots, points

PPO = [
    {"step": 0, "eval/success_once": 0.25, "eval/num_episodes": 8.0, "eval/return": 0.5},
    *(
        {
            "step": step,
            "env/success_once": None if step == 2 else step / 100,
            "env/return": step / 50,
            "train/loss": 1 / step,
            "train/actor/kl_k3": 1e-3,
            "train/actor/lr": 1e-4,
            "train/critic/lr": 1e-3 / step,
            "train/critic/explained_variance": -50.0 if step == 1 else 0.5,
            "time/iteration": 2.0,
        }
        for step in range(1, 60)
    ),
]
SFT = [{"step": step, "train/loss": 1 / step, **({"heldout/loss": 2.0} if step == 3 else {})} for step in (1, 2, 3)]


def titles(lines):
    return [plot.title.partition(",")[0] for plot in plots({"": [lines]})]


def plot_of(title, groups) -> Plot:
    return next(plot for plot in plots(groups) if plot.title.startswith(title))


def test_each_run_has_the_plots_of_what_it_logs():
    assert titles(PPO) == [
        "success",
        "return of an episode",
        "loss",
        "KL from the policy that acted",
        "explained variance of the critic",
        "learning rate",
        "seconds of an iteration",
    ]
    assert titles(SFT) == ["loss"]
    constant = [{key: value for key, value in line.items() if key != "train/critic/lr"} for line in PPO]
    assert "learning rate" not in titles(constant), "there is nothing to see of it"
    assert titles([]) == titles([{"step": 1, "frames": 3}]) == titles(PPO[:1]) == []
    assert titles([{"step": -step, "train/loss": step} for step in (2, 3)]) == ["loss"], "a stranger wrote it"


def test_points_are_finite_numbers():
    assert [place for place, _ in points(PPO, "env/success_once")][:3] == [1, 3, 4]
    assert points(PPO, "env/success_once", along="time/iteration")[:2] == [(2.0, 0.01), (2.0, 0.03)]
    assert points([{"step": 1, "a": "text"}, {"step": 2, "a": math.inf}, {"a": 1.0}], "a") == []


def test_a_success_rate_has_its_interval_and_seeds_have_a_band_from_smallest_to_largest():
    evaluated = [
        {"step": step, "eval/success_once": rate, "eval/num_episodes": 8.0} for step, rate in ((0, 0.25), (4, 0.5))
    ]
    (curve,) = plot_of("success", {"": [evaluated]}).curves
    assert curve.intervals
    assert curve.points[0] == (0, 25, *(100 * bound for bound in wilson_interval(2, 8)))
    other = [{**line, "eval/success_once": 1.0} for line in evaluated]
    (curve,) = plot_of("success", {"": [evaluated, other]}).curves
    assert not curve.intervals
    assert curve.points == [(0, 62.5, 25, 100), (4, 75, 50, 100)]


def test_of_many_points_neighbours_are_one():
    lines = [{"step": step, "train/loss": float(step % 2)} for step in range(1, 1001)]
    (curve,) = plot_of("loss", {"": [lines]}).curves
    assert 40 <= len(curve.points) <= 80
    assert all(point[1:] == pytest.approx((0.5, 0, 1), abs=0.1) for point in curve.points)
    higher = [{"step": line["step"], "train/loss": line["train/loss"] + 1} for line in lines[:500]]
    (curve,) = plot_of("loss", {"": [lines, higher]}).curves
    assert curve.points[3][1:] == pytest.approx((1, 0.5, 1.5), abs=0.1), "a band is of runs, not of neighbours"
    assert curve.points[-1][1:] == pytest.approx((0.5, 0.5, 0.5), abs=0.1)


def test_settings_are_told_apart_by_colour_and_seeds_are_not():
    groups = {"lr=1": [PPO, PPO], "lr=2": [PPO]}
    assert [(curve.label, curve.color) for curve in plot_of("loss", groups).curves] == [
        ("lr=1: training", 1),
        ("lr=2: training", 2),
    ]
    assert len(plot_of("seconds", {"": [PPO, PPO]}).curves) == 1


def test_everything_is_within_the_picture_and_ticks_are_round():
    for plot in plots({"": [PPO]}):
        for curve in plot.curves:
            for point in curve.points:
                assert 0 <= plot.x(point.step) <= 100
                assert 0 <= plot.y(point.low) <= 100
        assert 2 <= len(plot.y_ticks) <= 6
    success = plot_of("success", {"": [PPO]})
    assert success.y_ticks == [(100, "0"), (80, "20"), (60, "40"), (40, "60"), (20, "80"), (0, "100")]
    assert [text for _, text in success.x_ticks] == ["0", "20", "40"]


@pytest.mark.parametrize("kl", [[-1.2e-9], [-1.2e-9, -1e-9], [0.0, 0.0]])
def test_a_kl_that_rounding_made_negative_is_drawn(kl):
    lines = [{"step": step, "train/actor/kl_k3": value} for step, value in enumerate(kl, 1)]
    assert len(plots({"": [lines]})) == (len(kl) > 1)
