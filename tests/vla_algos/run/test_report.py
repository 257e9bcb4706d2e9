"""The page of a run: what it says is what the folder has, whatever that is, and it is safe to open."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from paths import CONF

from recipes.__main__ import main
from vla_algos.comparison import compare
from vla_algos.results import EpisodeResult, as_lines
from vla_algos.run.report import LARGEST, report_at_end, write_report
from vla_algos.run.videos import write_video
from vla_envs import Episode

EVIL = "</script><script>document.title='gone'</script><img src=x onerror=\"document.title='gone'\">'\"{{ 7 * 7 }}"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "link", "br", "img", "path"}


class Page(HTMLParser):
    """A page that is read strictly: every element is closed, in order."""

    def __init__(self, file):
        super().__init__()
        self.open, self.elements, self.texts, self._script = [], [], [], ""
        self.source = file.read_text()
        self.feed(self.source)
        assert self.open == []
        self.numbers = json.loads(self._script)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self._script += data
        elif self.open[-1:] != ["style"]:
            self.texts.append(data)

    def all(self, tag, name):
        """The values of an attribute."""
        return [attributes[name] for each, attributes in self.elements if each == tag and name in attributes]


def episodes(solved, count=8, tasks=("open", "close"), **other):
    """Results, of which the first ones are solved."""
    return [
        EpisodeResult(
            Episode(i % len(tasks), i, 9, i), tasks[i % len(tasks)], i < solved, i < solved, 0.5, 30, index=i, **other
        )
        for i in range(count)
    ]


def lines_of(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def evaluate(folder, step, results, kinds=("eval",), videos=1):
    """Write what an evaluation leaves; returns its line of ``metrics.jsonl``."""
    for kind in kinds:
        path = folder / "evaluations" / f"iteration_{step:04d}" / f"{kind}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_lines(results))
    for result in results[:videos]:
        film = folder / "videos" / f"iteration_{step:04d}" / f"{result.index:03d}_a_trial0_x.mp4"
        write_video(film, np.full((4, 32, 32, 3), 40 * step % 255, np.uint8), 4)
    finished = [result for result in results if not result.crashed]
    rate = sum(result.success_once for result in finished) / len(finished)
    return {"step": step, **{f"{kind}/{name}": value for kind in kinds for name, value in _metrics(rate, finished)}}


def _metrics(rate, finished):
    return {"success_once": rate, "num_episodes": float(len(finished)), "return": 0.5}.items()


def trained(step):
    return {
        "step": step,
        "env/success_once": step / 10,
        "env/return": step / 3,
        "train/loss": 1 / step,
        "train/actor/lr": 1e-4,
        "time/iteration": 4.0,
        "time/rollout": 2.5,
        "time/env": 1.5,
        "time/policy": 0.5,
        "time/train": 1.0,
        "time/elapsed": 10.0 + 4 * step,
    }


def process(*typed):
    return {
        "command": ["/usr/bin/python3", "recipes/ppo.py", *typed],
        "machine": "x86_64, 2 cores",
        "versions": {"torch": "2"},
    }


def run(folder, recipe="ppo", *, finished=True, last=4, kinds=("eval",), after=7, record=None, **settings):
    """Write the folder of a run with an evaluation before and one after ``last`` iterations."""
    folder.mkdir(parents=True)
    config = {
        "recipe": recipe,
        "seed": 0,
        "iterations": 4,
        "env": {"id": "toy/world"},
        "eval": {"mean_of": []},
        **settings,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [{**evaluate(folder, 0, episodes(3), kinds), "time/elapsed": 9.0}]
    lines += [trained(step) for step in range(1, last + 1)]
    lines += [evaluate(folder, last, episodes(after), kinds)] if finished else []
    lines_of(folder / "metrics.jsonl", lines)
    known = {"protocol_deviations": ["64 x 64 pixels"], "processes": [process("seed=0")]}
    known |= {"finished": "2026-11-25T10:00:00+00:00", "seconds": 27.5} if finished else {}
    (folder / "run.json").write_text(json.dumps(known | (record or {})))
    return folder


def evaluation(folder, *, finished=True, **record):
    """Write the folder of ``evaluate.py`` with an ablation."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"recipe": "evaluate", "seed": 0, "env": {"id": "toy/world"}}))
    (folder / "run.json").write_text(json.dumps({"processes": [process()], **record}))
    (folder / "episodes.jsonl").write_text(as_lines(episodes(6)))
    if finished:
        (folder / "episodes_blank_images.jsonl").write_text(as_lines(episodes(2)))
        (folder / "metrics.json").write_text("{}")
    return folder


def page(*folders, **options) -> Page:
    return Page(write_report(folders, **options))


# ---- what it says


def test_its_numbers_are_those_of_the_folder(tmp_path):
    folder = run(tmp_path / "run", record={"seconds": 27.5})
    found = page(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (numbers,) = found.numbers
    assert numbers["last"] == {name: value for line in lines for name, value in line.items()}
    row = compare(episodes(3), episodes(7)).all
    result = numbers["results"]["greedy"]["all tasks"]
    assert (result["first"]["value"], result["second"]["value"]) == (lines[0]["eval/success_once"], 7 / 8)
    assert result["difference"] == vars(row.difference)
    dots = [each for tag, each in found.elements if tag == "path" and "data-value" in each]
    drawn = {(float(each["data-step"]), float(each["data-value"])) for each in dots}
    for name, scale in (("eval/success_once", 100), ("env/success_once", 100), ("env/return", 1), ("train/loss", 1)):
        assert {(line["step"], scale * line[name]) for line in lines if name in line} <= drawn
    assert "Yes. Success rises from 37.5 % to 87.5 % of the same 8 held-out episodes: +50.0 points" in found.text
    assert found.all("tr", "data-row") == ["all tasks", "open", "close"]
    assert set(map(float, found.all("td", "data-after"))) == {7 / 8, 1.0, 3 / 4}
    for text in ("64 x 64 pixels", "python3 recipes/ppo.py seed=0", "1 episode fails in the end", "27.5 s", "torch 2"):
        assert text in found.text


def test_whether_training_helps_is_said_as_the_interval_says(tmp_path):
    assert "Not shown. Success goes from 37.5 % to 50.0 %" in page(run(tmp_path / "a", after=4)).text
    assert "which includes 0" in page(tmp_path / "a").text
    worse = run(tmp_path / "b", after=0)
    assert "No. Success falls from 37.5 % to 0.0 %" not in page(worse).text, "of 8 episodes that is not shown"
    assert "\N{MINUS SIGN}37.5 points" in page(worse).text


def test_solved_tasks_of_a_chain_are_said(tmp_path):
    folder = run(tmp_path / "run", finished=False)
    with open(folder / "metrics.jsonl", "a") as file:
        for step, solved in ((0, 1.25), (2, None), (4, 2.5)):
            file.write(json.dumps({"step": step, "eval/avg_num_subtasks": solved}) + "\n")
    assert "1.25 tasks of a chain are solved at first, 2.50 in the end" in page(folder).text


def test_the_same_episode_is_shown_before_and_after(tmp_path):
    folder = run(tmp_path / "run")
    found = page(folder)
    assert [url[:22] for url in found.all("video", "src")] == ["data:video/mp4;base64,"] * 2
    assert "The same episode, before and after" in found.text
    assert "before: solved after: solved" in found.text
    (film,) = found.all("figure", "id")
    assert found.all("a", "href") == [], "the episode that fails in the end is not filmed"
    evaluate(folder, 4, episodes(0), videos=1)
    assert page(folder).all("a", "href") == [f"#{film}"]


def test_settings_that_are_not_the_default_are_listed(tmp_path):
    default = yaml.safe_load((CONF / "ppo.yaml").read_text())
    found = page(run(tmp_path / "run", gae={**default["gae"], "gamma": 0.5}, iterations=45, save_to=None), conf=CONF)
    assert "gae.gamma 0.9 0.5" in found.text
    assert "save_to null" in found.text, "as it is typed"
    assert "gae.lmbda" not in found.text
    assert "Settings that are not" not in page(tmp_path / "run").text


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        ("ppo", {}, "Does PPO raise success in toy/world?"),
        ("grpo", {"kinds": ("eval", "eval_sampled")}, "of the same 8 held-out episodes, sampled: +50.0 points"),
        ("ppo_async", {}, "Does PPO ASYNC raise"),
        ("sft", {"cloning": {"steps": 4}}, "How often does the policy succeed in toy/world?"),
        ("ppo", {"finished": False, "last": 2}, "Not finished: 2 of 4 iterations are logged. To resume, type"),
        ("ppo", {"finished": False, "last": 0}, "Before training the policy solves 37.5 % of 8 held-out episodes"),
        ("ppo", {"record": {"processes": [process()] * 3}}, "It was resumed: 3 processes ran it"),
        ("ppo", {"record": {"ended": "nothing to learn"}}, "It ended early: nothing to learn"),
        ("ppo", {"record": {"protocol_deviations": [], "protocol": "MT50"}}, "the benchmark's own protocol, MT50"),
        ("ppo", {"record": {"submitted": {"command": ["vla-recipe", "run"]}}}, "vla-recipe run"),
        ("mine", {"env": "none"}, "an unknown suite"),
    ],
)
def test_every_kind_of_run_has_a_page(recipe, options, said, tmp_path):
    assert said in page(run(tmp_path / "run", recipe, **options)).text


def test_an_evaluation_has_a_page_with_its_ablations(tmp_path):
    found = page(evaluation(tmp_path / "run", finished="2026"))
    assert "The policy solves 75.0 % of 8 held-out episodes (95 % interval" in found.text
    assert found.numbers[0]["ablations"]["blank images"]["difference"]["value"] == -0.5
    assert "2 episodes fail in the end" in found.text


def test_no_rate_is_given_of_an_evaluation_that_was_broken_off(tmp_path):
    """Episodes that are solved end first: those that are there succeed too often."""
    found = page(evaluation(tmp_path / "alone", finished=False))
    assert "No rate is given" in found.text
    assert found.numbers[0]["results"] == {}
    folder = run(tmp_path / "training", finished=False)
    evaluate(folder, 4, episodes(2, count=2))  # metrics.jsonl does not have it
    assert "Before training the policy solves 37.5 %" in page(folder).text


@pytest.mark.parametrize("mark", ["config.yaml", "run.json", "metrics.jsonl", "episodes.jsonl"])
def test_a_run_of_which_there_is_next_to_nothing_has_a_page(mark, tmp_path):
    (tmp_path / mark).write_text("")
    found = page(tmp_path)
    assert "There is no answer yet" in found.text
    assert "Not finished" in found.text


def test_crashed_episodes_and_those_of_one_evaluation_alone_are_counted(tmp_path):
    folder = run(tmp_path / "run", finished=False)
    crashed = [*episodes(7)[:6], *episodes(0, crashed=True, error="it fell")[6:]]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(evaluate(folder, 4, crashed)) + "\n")
    found = page(folder)
    assert "2 episodes are not compared" in found.text
    assert "it fell" in found.text
    other = evaluate(folder, 4, episodes(7, tasks=("push",)))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(other) + "\n")
    assert "8 episodes are not compared" in page(folder).text


# ---- several runs


def test_seeds_are_one_setting_with_bands(tmp_path):
    folders = [run(tmp_path / f"seed{seed}", seed=seed, after=after) for seed, after in ((0, 6), (1, 8))]
    found = page(*folders, to=tmp_path / "page.html")
    assert "rises from 37.5 % to 87.5 % of the same 8 held-out episodes, mean of 2 runs" in found.text
    assert "seed0, seed 0" in found.text
    assert len(found.numbers) == 2
    bands = [each for tag, each in found.elements if tag == "path" and each.get("class") == "band"]
    assert bands
    assert page(tmp_path).text == found.text, "the folder of a sweep has its runs"
    assert (tmp_path / "report.html").is_file()


def test_an_episode_that_a_run_repeats_fails_in_one_run(tmp_path):
    folders = [run(tmp_path / f"seed{seed}", seed=seed, finished=False) for seed in range(2)]
    for folder in folders:
        again = [replace(each, index=each.index + 8 * turn) for turn in range(4) for each in episodes(6)]
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(evaluate(folder, 4, again)) + "\n")
    found = page(*folders, to=tmp_path / "page.html")
    assert "2 episodes fail in the end" in found.text
    assert "in 2 of 2 runs" in found.text


def test_settings_are_compared_in_a_table(tmp_path):
    for place, (lr, seed, after) in enumerate([(0.1, 0, 4), (0.1, 1, 6), (0.2, 0, 8)]):
        run(tmp_path / str(place), optim={"lr": lr}, seed=seed, after=after)
    os.symlink("2", tmp_path / "latest")
    found = page(tmp_path)
    assert "Which setting succeeds most often in toy/world?" in found.text
    assert found.all("tr", "data-row")[:2] == ["optim.lr=0.1", "optim.lr=0.2"]
    assert list(map(float, found.all("td", "data-after")))[:2] == [5 / 8, 1.0]
    assert "optim.lr=0.2 has the highest success, 100.0 %" in found.text
    run(tmp_path / "other", optim={"other": 1}, after=2)  # has no such setting: the folders are the names
    named = [str(tmp_path / name) for name in ("0", "2", "other")]
    assert page(tmp_path).all("tr", "data-row")[:3] == named


# ---- what a stranger may send


def test_nothing_of_a_run_is_markup_or_runs(tmp_path):
    folder = run(tmp_path / EVIL.replace("/", "|"), EVIL, gae={EVIL: EVIL}, finished=False, last=1)
    lines_of(folder / "metrics.jsonl", [trained(1), {"step": 1, EVIL: 1.0, "train/loss": EVIL}])
    results = episodes(0, tasks=(EVIL,), error=EVIL, remark=EVIL, group=EVIL)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(evaluate(folder, 0, results)) + "\n" + json.dumps(evaluate(folder, 1, results)) + "\n")
    said = {"protocol_deviations": [EVIL], "evaluated_on": EVIL, "ended": EVIL, "finished": EVIL, "protocol": EVIL}
    said |= {"processes": [{"command": [EVIL], "versions": {EVIL: EVIL}, "machine": EVIL, "gpus": [EVIL]}] * 2}
    (folder / "run.json").write_text(json.dumps(said))
    found = page(folder)
    assert [each for tag, each in found.elements if tag == "script"] == [{"type": "application/json", "id": "numbers"}]
    assert not [tag for tag, _ in found.elements if tag in ("img", "iframe", "object", "embed", "form", "base")]
    assert not [name for _, each in found.elements for name in each if name.startswith("on")]
    links = [each[name] for _, each in found.elements for name in ("src", "href") if name in each]
    assert all(link.startswith(("data:", "#")) for link in links)
    assert EVIL[:40] in found.text
    assert "49" not in found.text.split("Deviations")[1].split("Time")[0]
    assert "default-src 'none'" in found.source


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    folder = run(tmp_path / "run")
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path / "secret", folder / "videos" / "iteration_0000" / "001_a_trial0_x.mp4")
    with pytest.raises(ValueError, match="link out of the run's folder"):
        write_report([folder])


@pytest.mark.parametrize(
    "record",
    [
        {"processes": 3},
        {"processes": [{"command": 5, "gpus": 7, "machine": []}]},
        {"protocol_deviations": {"a": 1}, "seconds": "long", "finished": 12, "evaluated_on": [1]},
        {"submitted": {"command": []}},
    ],
)
def test_a_record_that_is_none_of_ours_does_no_harm(record, tmp_path):
    assert page(run(tmp_path / "run", record=record)).numbers


def test_a_page_has_at_most_5_megabytes_and_says_what_is_left_out(tmp_path):
    folder = run(tmp_path / "run")
    for result in episodes(0):
        for step in (0, 4):
            film = folder / "videos" / f"iteration_{step:04d}" / f"{result.index:03d}_a_trial0_x.mp4"
            film.write_bytes(os.urandom(600_000))
    found = page(folder)
    assert len(found.all("video", "src")) == 4
    assert "12 more videos are left out" in found.text
    assert len(found.source.encode()) < LARGEST


# ---- where it is written


def test_another_file_is_not_overwritten_and_mistakes_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = run(tmp_path / "run")
    assert main(["report", "run"]) == main(["report", "run"]) == 0
    assert capsys.readouterr().out == "wrote run/report.html\n" * 2
    Path("mine.html").write_text("mine")
    for typed, said in {
        ("run", "--to", "mine.html"): "mine.html is there and is no page of vla-recipe report; type --to",
        ("elsewhere",): "elsewhere: there is no such folder; type that of a run",
        ("run/videos",): "run/videos has no run in it",
    }.items():
        assert main(["report", *typed]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    assert Path("mine.html").read_text() == "mine"
    assert main(["report", "run", "run", "--to", "both.html"]) == 0
    assert "mean of 2 runs" in Page(tmp_path / "both.html").text
    assert folder.exists()


def test_a_run_is_complete_where_its_page_cannot_be_written(tmp_path):
    folder = run(tmp_path / "run")
    (folder / "report.html").mkdir()
    said = report_at_end(folder, CONF)
    assert said.startswith("warning: there is no page of this run (")
    assert said.endswith(f"type: vla-recipe report {folder}")
    (folder / "report.html").rmdir()
    assert report_at_end(folder, CONF) == f"report       {folder / 'report.html'}"


# ---- in a browser


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_a_browser_shows_it_without_errors_and_without_scrolling_sideways(tmp_path):
    """In frames of the width of a phone and of a desk; copies that may run a script say how wide they are."""
    tasks = ("button-press-topdown-v3", "a" * 70)
    said = {"protocol_deviations": ["c" * 200, EVIL]}
    folder = run(tmp_path / "run", gae={EVIL: EVIL, "long": "b" * 500}, record=said)
    evaluate(folder, 0, episodes(3, tasks=tasks), videos=2)
    evaluate(folder, 4, episodes(7, tasks=tasks), videos=2)
    files = [write_report([folder]), write_report([folder, evaluation(tmp_path / "other")], tmp_path / "two.html")]
    measure = "`${innerWidth} ${document.documentElement.scrollWidth};`"
    script = f"<script>onload = () => parent.postMessage({measure}, '*')</script>"
    for file in list(files):
        page, policies = re.subn("<meta http-equiv=[^>]*>", "", file.read_text())
        assert policies == 1, "which forbids scripts, such as this one"
        files.append(file.with_name(f"measured_{file.name}"))
        files[-1].write_text(page + script)
    frames = [
        f"<iframe src='{file.as_uri()}' width={width} height=900></iframe>" for file in files for width in (400, 1200)
    ]
    (tmp_path / "all.html").write_text(
        f"<link rel=icon href='data:,'><body><p></p><style>iframe {{border: 0}}</style>{''.join(frames)}"
        "<script>onmessage = said => document.querySelector('p').append(said.data)</script>"
    )
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars"]
    flags += [f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=5000", "--dump-dom"]
    command = [CHROMIUM, *flags, (tmp_path / "all.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert "CONSOLE" not in shown.stderr, shown.stderr
    widths = re.search("<p>(.*?)</p>", shown.stdout)[1].split(";")[:-1]
    assert sorted(widths) == ["1200 1200"] * 2 + ["400 400"] * 2
