"""What a policy did in an evaluation as a data set of LeRobot: the frames that it saw, the actions that it took."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import DatasetCard

from recipes.__main__ import main
from vla_algos import StepCollector, evaluate
from vla_algos.lerobot.dataset import LeRobotFolder
from vla_algos.lerobot.demonstrations import LeRobotDemonstrations
from vla_algos.results import NAME, TRAINED, as_lines, read_episodes, read_training
from vla_algos.run import TrainVideos
from vla_algos.run.rollouts import CAMERA, write_rollouts
from vla_common import keys
from vla_envs import EpisodeQueue, EpisodeSampler, evaluation_episodes, make_env
from vla_policies import make_policy

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install 'vla-torchrl[lerobot]'")

ENV = {"id": "metaworld/reach-v3+push-v3", "num_envs": 2, "num_workers": 2, "image_size": 32, "max_episode_steps": 12}
ENV |= {"render_quality": "minimal"}
SMALL = {"family": "small", "dim": 16, "layers": 1, "heads": 2, "channels": [4, 4, 4], "keypoints": 4, "chunk_size": 5}


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    """A folder as evaluate.py writes it, and what the policy saw by episode and decision."""
    folder = tmp_path_factory.mktemp("evaluation")
    env = make_env(**ENV, chunk_size=5, episodes=EpisodeQueue())
    torch.manual_seed(0)
    policy = make_policy(env.simulator_spec, **SMALL)
    seen = {}

    def keep(inputs):
        for index, decision, images in zip(
            inputs[keys.EPISODE_INDEX].tolist(), inputs[keys.DECISION_INDEX].tolist(), inputs[keys.IMAGES], strict=True
        ):
            seen[index, decision] = images.clone()
        return inputs

    episodes = evaluation_episodes(env.simulator_spec, 2)
    result = evaluate(env, policy, episodes, observe=keep, keep_actions=True)
    env.close()
    (folder / NAME).write_text(as_lines(result.episodes))
    (folder / "config.yaml").write_text(yaml.safe_dump({"env": ENV, "policy": {"checkpoint": "somewhere"}}))
    return folder, seen, policy, env.simulator_spec


@pytest.fixture(scope="module")
def written(evaluation, tmp_path_factory):
    to = tmp_path_factory.mktemp("rollouts") / "set"
    assert main(["rollouts", str(evaluation[0]), "--to", str(to)]) == 0
    return to


def test_the_frames_are_those_that_the_policy_saw(evaluation, written):
    folder, seen, policy, spec = evaluation
    found = LeRobotDemonstrations.open(written, spec, stride=5)
    rows = found.for_policy(policy)[torch.arange(12)]  # four episodes of twelve actions, at 0, 5 and 10
    results = read_episodes(folder / NAME)
    assert len(seen) == 12
    for number, (index, decision) in enumerate((index, decision) for index in range(4) for decision in range(3)):
        assert torch.equal(rows[keys.IMAGES][number], seen[index, decision])
        done = torch.tensor(results[index].actions)[5 * decision : 5 * decision + 5]
        assert torch.equal(rows[keys.ACTION][number][rows[keys.STEP_MASK][number]], done)
    assert found.remarks == ()
    assert rows[keys.TASK_ID].tolist() == [result.episode.task_id for result in results for _ in range(3)]


def test_what_lerobot_asks_of_a_data_set(evaluation, written):
    results = read_episodes(evaluation[0] / NAME)
    info = json.loads((written / "meta" / "info.json").read_text())
    assert (info["codebase_version"], info["total_episodes"], info["total_frames"]) == ("v3.0", 4, 48)
    table = pq.read_table(written / info["data_path"].format(chunk_index=0, file_index=0))
    assert set(table.column_names) == set(info["features"])
    assert table["index"].to_pylist() == list(range(48))
    assert table["timestamp"].to_pylist() == pytest.approx(4 * [number / info["fps"] for number in range(12)])
    assert table["next.done"].to_pylist() == 4 * ([False] * 11 + [True])
    assert sum(table["next.reward"].to_pylist()) == pytest.approx(sum(each.episode_return for each in results))
    assert LeRobotFolder.read(written).unsolved == sum(not each.success_once for each in results) == 4
    rows = pq.read_table(written / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    assert [(row["dataset_from_index"], row["dataset_to_index"]) for row in rows] == [
        (0, 12),
        (12, 24),
        (24, 36),
        (36, 48),
    ]
    identities = [(row["task_id"], row["trial_id"], row["seed"], row["policy"], row["success"]) for row in rows]
    expected = [(each.episode.task_id, each.episode.trial_id, each.episode.seed) for each in results]
    assert identities == [
        (*each, "somewhere", result.success_once) for each, result in zip(expected, results, strict=True)
    ]
    card = DatasetCard.load(written / "README.md")
    assert card.data.configs[0]["data_files"] == "data/*/*.parquet"
    assert f"| {results[0].task} | 0 | 2 |" in card.text
    assert "not the benchmark's: " in card.text
    stats = json.loads((written / "meta" / "stats.json").read_text())
    actions = np.concatenate([each.actions for each in results])
    assert stats["action"]["q99"] == pytest.approx(np.quantile(actions, 0.99, axis=0))
    frames = np.stack([each for _, each in sorted(evaluation[1].items())]) / 255  # every fifth
    assert np.ravel(stats[CAMERA]["mean"]) == pytest.approx(frames.mean((0, 1, 2)), abs=0.01)
    assert np.ravel(stats[CAMERA]["std"]) == pytest.approx(frames.reshape(-1, 3).std(0), abs=0.01)


def test_episodes_of_training_too(evaluation, tmp_path):
    """Frames are those that the policy saw before each decision, of episodes that span iterations."""
    policy, spec, folder, seen = *evaluation[2:], tmp_path / "run", []
    folder.mkdir()
    films = TrainVideos(
        SimpleNamespace(folder=folder, config=SimpleNamespace(env=ENV, seed=3)), spec, keep_actions=True
    )

    def hook(outcome):
        films(outcome)
        begins = outcome[keys.NEXT, keys.EPISODE_LEN] - outcome[keys.NEXT, keys.STEP_MASK].sum(-1, keepdim=True)
        where = zip(outcome[keys.TRIAL_ID].tolist(), begins.flatten().tolist(), outcome[keys.IMAGES], strict=True)
        seen.extend(((trial, begin), images.clone()) for trial, begin, images in where)

    env = make_env(**ENV, chunk_size=5, episodes=EpisodeSampler(spec, 3))
    collector = StepCollector(env, policy, decisions=2, step_hook=hook)
    for iteration in range(1, 5):
        with films.of(iteration, 5):
            collector.rollout()
    env.close()
    (folder / "config.yaml").write_text((evaluation[0] / "config.yaml").read_text())
    kept = read_training(folder / TRAINED)
    assert [each.episode_len for each in kept] == 4 * [12]
    assert main(["rollouts", str(folder), "--to", str(tmp_path / "set")]) == 0
    rows = LeRobotDemonstrations.open(tmp_path / "set", spec, stride=5).for_policy(policy)[torch.arange(12)]
    places, found = [(each.episode.trial_id, begin) for each in kept for begin in (0, 5, 10)], dict(seen)
    assert len(found) == len(seen) == 16
    for place, images in zip(places, rows[keys.IMAGES], strict=True):
        assert torch.equal(images, found[place])
    done = rows[keys.ACTION][rows[keys.STEP_MASK]]
    assert torch.equal(done[:5], torch.tensor(kept[0].actions[:5]))
    rows = pq.read_table(tmp_path / "set" / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    assert {row["policy"] for row in rows} == {str(folder)}
    assert main(["rollouts", str(folder), "--to", str(tmp_path / "solved"), "--only-success"]) == 2  # it solves none


def changed(folder, to, **changes):
    """Another evaluation, of which each result has some other entries."""
    lines = [{**json.loads(line), **changes} for line in (folder / NAME).read_text().splitlines()]
    to.mkdir()
    (to / NAME).write_text(
        "".join(json.dumps({k: v for k, v in line.items() if v is not None}) + "\n" for line in lines)
    )
    (to / "config.yaml").write_text((folder / "config.yaml").read_text())
    return to


def test_what_cannot_be_written_is_one_line(evaluation, written, tmp_path, capsys):
    folder, to = evaluation[0], tmp_path / "set"
    cases = {
        "none of its episodes was solved": [str(folder), "--to", str(to), "--only-success"],
        "has no actions": [str(changed(folder, tmp_path / "a", actions=None)), "--to", str(to)],
        "is there already": [str(folder), "--to", str(written)],
        "no evaluation is here": [str(tmp_path / "nothing"), "--to", str(to)],
    }
    for said, typed in cases.items():
        assert main(["rollouts", *typed]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_an_episode_that_went_another_way_is_not_written(evaluation, tmp_path):
    other = changed(evaluation[0], tmp_path / "b", success_once=True)
    with pytest.raises(ValueError, match="reach-v3 trial 0 seed 0 goes another way than it did"):
        [*write_rollouts(other, tmp_path / "set")]
    assert {path.name for path in tmp_path.iterdir()} == {"b"}


def test_a_folder_of_a_stranger_is_data(evaluation, tmp_path):
    for number, (actions, said) in enumerate(
        {
            "[[1, 2]]": r"12 of 4 numbers are wanted, not \(1, 2\)",
            '[["x"]]': "its actions are none of metaworld",
            "[[0, 0, 0, NaN]]": "its actions are none of metaworld",
            "[[1], [2, 3]]": "its actions are none of metaworld",
        }.items()
    ):
        other = changed(evaluation[0], tmp_path / str(number), actions=json.loads(actions))
        with pytest.raises(ValueError, match=said):
            [*write_rollouts(other, tmp_path / "set")]
    folders = {
        "env: {id: no/where}": "no/where",
        "env: {id: metaworld/reach-v3, run: rm}": "env.run",
        "env: {id: calvin/D, path: /theirs/calvin_env}": "env.path=/theirs/calvin_env may be code of a stranger",
    }
    for text, said in folders.items():
        (other / "config.yaml").write_text(text)
        with pytest.raises(ValueError, match=said):
            [*write_rollouts(other, tmp_path / "set")]
    assert not (tmp_path / "set").exists()
