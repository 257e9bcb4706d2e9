"""Videos of training: what collectors hand over is filmed, and nothing else changes."""

import imageio.v3 as iio
import numpy as np
import torch
from toy import ToyActorCritic, ToyEnv, ToyPolicy

from vla_algos import EpisodeCollector, StepCollector
from vla_algos.run import files
from vla_algos.run.train_videos import TrainVideos
from vla_common.keys import ACTION, CRASHED, NEXT
from vla_envs.simulator import Episode


def collected(film, iterations=2, crashes=None):
    """Batches of a StepCollector that ``film`` listens to."""
    torch.manual_seed(0)
    collector = StepCollector(ToyEnv(3, crashes=crashes), ToyActorCritic(), decisions=4, on_decision=film)
    batches = []
    for iteration in range(1, iterations + 1):
        if film is not None:
            film.begin(iteration)
        batches.append(collector.rollout())
    return batches


def test_an_iteration_of_the_first_environments_is_a_video_each(tmp_path):
    film = TrainVideos(tmp_path, environments=2, every=2)
    (_, batch) = collected(film)
    paths = film.write(2, fps=4.0)
    assert paths == [tmp_path / "iteration_0002" / f"environment_{slot}.mp4" for slot in (0, 1)]
    for slot, path in enumerate(paths):
        begun = int((batch[NEXT, "episode_len"] == batch[NEXT, "step_mask"].sum(-1, keepdim=True))[slot].sum())
        frames = iio.imread(path)
        assert len(frames) == 4 + begun, "a frame after each decision, and one before the first of an episode"
        assert frames.shape[2] >= 256
        assert frames.shape[1] > 256, "a caption is below"
        assert iio.immeta(path)["fps"] == 4.0
    assert film.write(2, fps=4.0) == [], "what is written is forgotten"


def test_only_every_so_many_iterations_are_filmed(tmp_path):
    film = TrainVideos(tmp_path, environments=1, every=3)
    assert [iteration for iteration in range(1, 10) if film.films(iteration)] == [3, 6, 9]
    collected(film, iterations=2)
    assert film.write(2, fps=4.0) == []
    assert not any(TrainVideos(tmp_path).films(iteration) for iteration in range(1, 10))
    assert list(tmp_path.iterdir()) == []


def test_filming_moves_no_bit(tmp_path):
    filmed = collected(TrainVideos(tmp_path, environments=3))
    drawn = torch.rand(1)
    plain = collected(None)
    assert torch.equal(drawn, torch.rand(1))
    for mine, other in zip(filmed, plain, strict=True):
        assert set(mine.keys(True, True)) == set(other.keys(True, True))
        assert all(torch.equal(mine[key], other[key]) for key in (ACTION, (NEXT, "reward"), (NEXT, "episode_return")))


def test_what_an_interrupted_iteration_has_left_is_forgotten(tmp_path):
    film = TrainVideos(tmp_path, environments=1)
    collected(film, iterations=1)
    film.begin(1)
    assert film.write(1, fps=4.0) == []


def test_episodes_of_a_queue_follow_each_other(tmp_path):
    film = TrainVideos(tmp_path, environments=1)
    collector = EpisodeCollector(ToyEnv(1), ToyPolicy(), [Episode(i % 2, i) for i in range(3)], on_decision=film)
    film.begin(1)
    decisions = sum(len(episode) for episode in collector)
    shots = film._shots[0]
    assert len(shots) == decisions + 3
    assert sum(text.endswith("return 0.00") for _, text in shots) >= 3
    (path,) = film.write(1, fps=4.0)
    assert len(iio.imread(path)) == len(shots)


def test_a_caption_tells_what_was_asked_and_what_came_of_it(tmp_path):
    film = TrainVideos(tmp_path, environments=3)
    (batch,) = collected(film, iterations=1)
    for slot in range(3):
        texts = [text for _, text in film._shots[slot]]
        assert all(text.startswith(("go low\nreturn ", "go high\nreturn ")) for text in texts)
        assert any(text.endswith(", solved") for text in texts) == bool(batch[NEXT, "success"][slot].any())


def test_a_crash_has_no_frame(tmp_path):
    film = TrainVideos(tmp_path, environments=1)
    (batch,) = collected(film, iterations=1, crashes={1: 1})
    assert batch[NEXT, CRASHED][0].sum() == 1
    assert len(film._shots[0]) == 4 - 1 + 2


def test_a_video_that_cannot_be_written_is_left_out_and_said(tmp_path, capsys):
    (tmp_path / "videos").write_text("a file, where a folder should be")
    film = TrainVideos(tmp_path / "videos", environments=1)
    collected(film, iterations=1)
    assert film.write(1, fps=4.0) == []
    assert "the run goes on without it" in capsys.readouterr().out
    files._failing.clear()


def test_frames_are_copies(tmp_path):
    film = TrainVideos(tmp_path, environments=1)
    collected(film, iterations=1)
    frames = [frame for frame, _ in film._shots[0]]
    assert all(frame.dtype == np.uint8 and frame.base is None for frame in frames)
