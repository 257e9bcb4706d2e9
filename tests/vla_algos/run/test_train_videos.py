"""Videos of training: what collectors pass on is filmed, and nothing else changes."""

from types import SimpleNamespace

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from toy import ToyActorCritic, ToyEnv, ToyPolicy

from vla_algos import EpisodeCollector, StepCollector
from vla_algos.run import TrainVideos
from vla_common.keys import ACTION, CRASHED, NEXT
from vla_envs.simulator import Episode

SPEC = SimpleNamespace(control_frequency=12.0)


class Films(TrainVideos):
    """Films of a run of three environments, and the videos that its loggers get."""

    def __init__(self, folder, **settings):
        self.logged = []
        run = SimpleNamespace(folder=folder, config=SimpleNamespace(env={"num_envs": 3}))
        run.log_videos = lambda prefix, paths, iteration: self.logged.extend((prefix, path) for path in paths)
        super().__init__(run, SPEC, **settings)

    @property
    def paths(self):
        return [path for _, path in self.logged]


def collected(films, iterations=2, crashes=None):
    """Batches of a StepCollector that is filmed."""
    torch.manual_seed(0)
    collector = StepCollector(ToyEnv(3, crashes=crashes), ToyActorCritic(), decisions=4, step_hook=films.hook)
    batches = []
    for iteration in range(1, iterations + 1):
        with films.of(iteration, chunk_size=3):
            batches.append(collector.rollout())
    return batches


def test_an_iteration_of_the_first_environments_is_a_video_each(tmp_path):
    films = Films(tmp_path, environments=2, every=2)
    (_, batch) = collected(films)
    folder = tmp_path / "videos" / "training" / "iteration_0002"
    assert films.logged == [("train", folder / f"environment_{slot}.mp4") for slot in (0, 1)]
    for slot, path in enumerate(films.paths):
        begun = int((batch[NEXT, "episode_len"] == batch[NEXT, "step_mask"].sum(-1, keepdim=True))[slot].sum())
        frames = iio.imread(path)
        assert len(frames) == 4 + begun, "a frame after each decision, and one before the first of an episode"
        assert frames.shape[2] >= 256
        assert frames.shape[1] > 256, "a caption is below"
        assert iio.immeta(path)["fps"] == 4.0


def test_only_every_so_many_iterations_are_filmed(tmp_path):
    films = Films(tmp_path, environments=1, every=3)
    collected(films, iterations=7)
    assert [path.parent.name for path in films.paths] == ["iteration_0003", "iteration_0006"]
    nothing = Films(tmp_path / "none")
    assert nothing.hook is None
    collected(nothing, iterations=1)
    assert not (tmp_path / "none").exists()


def test_more_environments_than_there_are_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"train_videos.environments=4: there are 3 environments; type train_videos"):
        Films(tmp_path, environments=4)


def test_filming_moves_no_bit(tmp_path):
    filmed = collected(Films(tmp_path, environments=3))
    drawn = torch.rand(1)
    plain = collected(Films(tmp_path))
    assert torch.equal(drawn, torch.rand(1))
    for mine, other in zip(filmed, plain, strict=True):
        assert set(mine.keys(True, True)) == set(other.keys(True, True))
        assert all(torch.equal(mine[key], other[key]) for key in (ACTION, (NEXT, "reward"), (NEXT, "episode_return")))


def test_episodes_of_a_queue_follow_each_other(tmp_path):
    films = Films(tmp_path, environments=1)
    collector = EpisodeCollector(ToyEnv(1), ToyPolicy(), [Episode(i % 2, i) for i in range(3)], step_hook=films.hook)
    with films.of(1, chunk_size=3):
        decisions = sum(len(episode) for episode in collector)
        shots = films._shots[0]
    assert len(shots) == decisions + 3
    assert sum(text.endswith("return 0.00") for _, text in shots) >= 3
    assert all(frame.dtype == np.uint8 and frame.base is None for frame, _ in shots), "frames are copies"
    (path,) = films.paths
    assert len(iio.imread(path)) == len(shots)


@pytest.mark.parametrize("crashes", [None, {1: 1}])
def test_a_caption_tells_what_was_asked_and_what_came_of_it_and_a_crash_has_no_frame(crashes, tmp_path):
    films, shots = Films(tmp_path, environments=3), []
    films._write = lambda filmed, *_: shots.append(filmed) or []
    (batch,) = collected(films, iterations=1, crashes=crashes)
    for slot in range(3):
        texts = [text for _, text in shots[0][slot]]
        assert all(text.startswith(("go low\nreturn ", "go high\nreturn ")) for text in texts)
        assert any(text.endswith(", solved") for text in texts) == bool(batch[NEXT, "success"][slot].any())
    if crashes:
        assert batch[NEXT, CRASHED][0].sum() == 1
        assert len(shots[0][0]) == 4 - 1 + 2
