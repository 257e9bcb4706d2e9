"""The loggers of a run: TensorBoard, wandb, swanlab, trackio; what comes again after a resume, and what fails."""

import importlib.machinery
import importlib.util
import io
import json
import signal
import socket
import struct
import sys
import time

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from paths import CONF
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.summary.writer import event_file_writer

from vla_algos.run import loggers
from vla_algos.run.loggers import _Service, as_gif, check_loggers, open_loggers
from vla_algos.run.logging import RunLogger, entries
from vla_algos.run.videos import write_video
from vla_common.settings import check_settings

SETTINGS = {"recipe": "ppo", "seed": 0, "optim": {"lr": 1e-3, "betas": [0.9, 0.999], "value_lr": None}}
MISSING = "{0} is not installed: pip install 'vla-torchrl[{0}]'"
OFFLINE = {"project": "vla", "mode": "offline"}


@pytest.fixture
def given(monkeypatch):
    """What a service of the name wandb has been given, whichever process it was."""
    given = []

    class Listed(_Service):
        name, where = "wandb", "nowhere"

        def __init__(self, folder, after, **options):
            super().__init__(folder, after, **options)
            given.append(f"run {self._id}")

        def _give(self, metrics, step):
            given.extend((step, name, value) for name, value in metrics.items())

        def _video(self, path):
            return path.name

        def log_settings(self, settings):
            given.append(settings)

    monkeypatch.setitem(loggers._CLASSES, "wandb", Listed)
    return given


def begin(folder, chosen, after=None):
    """What a process does that begins a run, or goes on after an iteration."""
    sinks = open_loggers(chosen, folder, after)
    return RunLogger(folder, -1 if after is None else after, sinks)


def log(logger, *steps, evaluated=()):
    for step in steps:
        logger.log({"train/loss": 1.0 / step}, step)
        if step in evaluated:
            logger.log({"eval/success_once": step / 10}, step)


def interrupted_twice(folder, chosen, pause=0.0):
    """Iterations 1 to 5 of a run that dies twice: after 4, when 2 are saved, and after 3 of those that come again."""
    folder.mkdir(parents=True, exist_ok=True)
    logger = begin(folder, chosen)
    logger.log_settings(SETTINGS)
    log(logger, 1, 2, 3, 4, evaluated=[2, 4])
    logger.close(failed=True)
    time.sleep(pause)
    logger = begin(folder, chosen, after=2)
    logger.log({"eval/success_once": 0.2}, 2)
    log(logger, 3)
    logger.close(failed=True)
    time.sleep(pause)
    logger = begin(folder, chosen, after=2)
    logger.log({"eval/success_once": 0.2}, 2)
    log(logger, 3, 4, 5, evaluated=[4])
    return logger


@pytest.fixture
def video(tmp_path):
    frames = np.zeros((4, 32, 48, 3), np.uint8)
    frames[2:] = 255
    return write_video(tmp_path / "videos" / "000_reach_trial1_success.mp4", frames, fps=8)


# ---- which there are


def test_loggers_are_chosen_one_or_several_with_settings_of_their_own():
    def chosen(*arguments):
        with initialize_config_dir(str(CONF), version_base=None):
            return OmegaConf.to_container(compose("ppo", overrides=list(arguments)).logger, resolve=True)

    assert chosen() == {"tensorboard": {"videos": True}}
    assert chosen("logger=[]") == {}
    assert list(chosen("logger=[tensorboard,wandb]", "logger.wandb.mode=offline")) == ["tensorboard", "wandb"]
    everything = chosen("logger=[tensorboard,wandb,swanlab,trackio]")
    assert everything.keys() == loggers.LOGGERS.keys()
    for name, settings in everything.items():  # the files have all settings, of the right types
        assert settings.keys() == loggers.LOGGERS[name].keys()
        check_settings(f"logger.{name}", settings, loggers.LOGGERS[name])


def test_the_mode_is_that_of_the_environment_where_none_is_typed(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with initialize_config_dir(str(CONF), version_base=None):
        assert compose("ppo", overrides=["logger=wandb"]).logger.wandb.mode == "offline"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"wandb": {"mode": "off"}}, "logger.wandb.mode=off: .*did you mean offline"),
        ({"wandb": {"project": "a/b"}}, "logger.wandb.project=a/b: "),
        (
            {"swanlab": {"projekt": "x"}},
            "unknown setting 'logger.swanlab.projekt'; did you mean logger.swanlab.project",
        ),
        ({"tensorboard": {"columns": ["x"]}}, "unknown setting 'logger.tensorboard.columns'"),
        ({"wandb": {}}, r"logger=wandb: .*not installed; type: pip install 'vla-torchrl\[wandb\]', or leave wandb out"),
    ],
)
def test_what_is_wrong_is_one_line_before_work(chosen, message, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # as if no package were installed
    with pytest.raises(ValueError, match=message) as raised:
        check_loggers(chosen)
    assert "\n" not in str(raised.value)


def test_a_service_without_a_key_is_refused(monkeypatch):
    monkeypatch.setattr(loggers, "_has_key", lambda name: False)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None, origin=name)
    )
    with pytest.raises(ValueError, match=r"type: wandb login, or logger\.wandb\.mode=offline"):
        check_loggers({"wandb": {"mode": "online"}})
    check_loggers({"wandb": {"mode": "offline"}, "tensorboard": {}})


@pytest.mark.parametrize(
    ("settings", "variable", "message"),
    [
        ({}, "TRACKIO_SPACE_ID", r"TRACKIO_SPACE_ID would send the run elsewhere; type: unset TRACKIO_SPACE_ID, or "),
        ({}, "TRACKIO_SERVER_URL", r"TRACKIO_SERVER_URL would send the run elsewhere; type: unset TRACKIO_SERVER_URL"),
        ({"space": "me/mine"}, None, r"type: hf auth login, or leave space out"),
        ({"space": "mine"}, None, r"logger\.trackio\.space=mine: "),
    ],
)
def test_trackio_sends_a_run_where_is_typed_and_nowhere_else(settings, variable, message, monkeypatch):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None, origin=name)
    )
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    check_loggers({"trackio": {}})
    if variable:
        monkeypatch.setenv(variable, "https://there")
    with pytest.raises(ValueError, match=message):
        check_loggers({"trackio": settings})


# ---- once, also after a resume


def test_nothing_stands_twice_after_a_resume(tmp_path, given, monkeypatch):
    # Files of one second are read in the order of their names: number 10 of a process before number 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    chosen = {"tensorboard": {}, "wandb": {}}
    interrupted_twice(tmp_path, chosen).close()

    losses = [(step, 1.0 / step) for step in (1, 2, 3, 4, 5)]
    assert list(dict.fromkeys((step, value) for step, name, value in numbers(given) if name == "train/loss")) == losses
    assert {step for step, name, _ in numbers(given) if name == "eval/success_once"} == {2, 4}
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in curves.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert {event.step for event in curves.Scalars("eval/success_once")} == {2, 4}
    rows = entries(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == losses
    assert {row["step"]: row["eval/success_once"] for row in rows if "eval/success_once" in row} == {2: 0.2, 4: 0.4}


def test_a_run_that_is_killed_before_its_first_checkpoint_begins_its_curves_again(tmp_path):
    for _ in range(2):
        logger = begin(tmp_path, {"tensorboard": {}}, after=None)
        logger.log({"eval/success_once": 0.5}, 0)
        logger.sync()
        time.sleep(1.1)  # the names of its files have the second in them
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert len(curves.Scalars("eval/success_once")) == 1


def numbers(given):
    return [each for each in given if isinstance(each, tuple)]


def test_the_run_elsewhere_is_the_same_one_and_a_new_run_is_another(tmp_path, given):
    interrupted_twice(tmp_path, {"wandb": {}}).close()
    begin(tmp_path, {}, after=5).close()  # once without it
    begin(tmp_path, {"wandb": {}}, after=5).close()
    ids = [each for each in given if isinstance(each, str)]
    assert len(ids) == 4
    assert len(set(ids)) == 1
    begin(tmp_path, {"wandb": {}}).close()
    assert given[-1] not in ids


# ---- settings and videos


def test_settings_and_videos_go_to_those_that_have_a_place_for_them(tmp_path, given, video):
    logger = begin(tmp_path, {"tensorboard": {"videos": True}, "wandb": {}})
    logger.log_settings(SETTINGS)
    logger.log_videos("eval", [video], 3)
    logger.close()
    assert SETTINGS in given
    assert (3, "eval/video_0", video.name) in given

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    shown = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert shown["optim.lr"].number_value == 1e-3
    assert shown["recipe"].string_value == "ppo"
    [image] = events.Images("eval/video_0")
    with Image.open(io.BytesIO(image.encoded_image_string)) as gif:
        assert (gif.format, gif.is_animated, gif.size) == ("GIF", True, (image.width, image.height))


def test_a_gif_is_small_and_moves(video):
    assert as_gif(video).startswith(b"GIF8")


# ---- what fails


def test_a_service_that_fails_ends_nothing_and_says_so_once(tmp_path, capsys, given, monkeypatch):
    logger = begin(tmp_path, {"wandb": {}, "tensorboard": {}})

    def fail(*_):
        raise ConnectionError("no network")

    monkeypatch.setattr(loggers._CLASSES["wandb"], "_give", fail)
    for step in range(1, 5):
        logger.log({"x": 1.0}, step)
        logger.sync()
    logger.close()
    assert capsys.readouterr().out.count("warning: wandb fails (no network); the run continues") == 1
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert len(curves.Scalars("x")) == len(entries(tmp_path / "metrics.jsonl")) == 4  # the others have everything


def test_a_full_disk_ends_the_run(tmp_path):
    logger = RunLogger(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        logger.log({"x": 1.0}, 1)


def test_a_service_that_cannot_begin_refuses_a_new_run_and_not_one_that_is_resumed(tmp_path, capsys, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("timed out\nafter 90 s")

    monkeypatch.setitem(loggers._CLASSES, "wandb", fail)
    with pytest.raises(OSError, match=r"^logger=wandb: timed out; .* type logger\.wandb\.mode=offline$"):
        open_loggers({"tensorboard": {}, "wandb": {}}, tmp_path)
    assert [logger.name for logger in open_loggers({"tensorboard": {}, "wandb": {}}, tmp_path, 3)] == ["tensorboard"]
    assert "logger=wandb: timed out; the run continues without it" in capsys.readouterr().out


def test_of_several_processes_the_first_logs(tmp_path, given, monkeypatch):
    monkeypatch.setattr("vla_algos.distributed.is_main", lambda: False)
    logger = begin(tmp_path, {"tensorboard": {}, "wandb": {}})
    log(logger, 1)
    logger.sync()
    logger.close()
    assert given == []
    assert list(tmp_path.iterdir()) == []


# ---- the services themselves, without a network


def records(path):
    """The records of a run's file of wandb or swanlab: a heading of 7 bytes, then LevelDB's log format."""
    content, at, found, whole = path.read_bytes(), 7, [], b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            found.append(whole)
            whole = b""
    return found


def test_wandb_offline(tmp_path, video, monkeypatch):
    pytest.importorskip("wandb", reason=MISSING.format("wandb"))
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = interrupted_twice(
        tmp_path / "runs" / "mine", {"wandb": OFFLINE}, pause=1.1
    )  # its folders are named after the second
    logger.log_videos("eval", [video], 5)
    command = logger.where()[0]
    logger.close()
    run_id = json.loads((tmp_path / "runs" / "mine" / "run.json").read_text())["wandb_id"]
    assert command.endswith(f"wandb/offline-run-*-{run_id}")
    paths = sorted((tmp_path / "runs" / "mine" / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert paths

    rows, config, runs = [], {}, []
    for path in paths:
        for content in records(path):
            record = Record.FromString(content)
            runs += [record.run] if record.HasField("run") else []
            for updated in [record.run.config, record.config]:
                for item in updated.update:
                    config[item.key or tuple(item.nested_key)] = json.loads(item.value_json)
            if record.HasField("history"):
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({name: json.loads(value) for name, value in row.items()})
    assert {run.run_id for run in runs} == {run_id}
    assert runs[0].project == "vla"
    assert runs[0].display_name == "runs/mine"
    assert config["optim"] == SETTINGS["optim"]
    losses = [(row["train/step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(step, 1.0 / step) for step in (1, 2, 3, 4, 5)]
    assert [row["eval/step"] for row in rows if "eval/success_once" in row] == [2, 4]
    assert [row["eval/video_0/_type"] for row in rows if "eval/video_0/_type" in row] == ["video-file"]


def test_swanlab_offline(tmp_path, video):
    pytest.importorskip("swanlab", reason=MISSING.format("swanlab"))
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    folder, hook, interrupt = tmp_path / "runs" / "mine", sys.excepthook, signal.getsignal(signal.SIGINT)
    logger = interrupted_twice(folder, {"swanlab": OFFLINE})
    assert (sys.excepthook, signal.getsignal(signal.SIGINT)) == (hook, interrupt)  # Ctrl-C is the run's
    logger.log_videos("eval", [video], 5)
    command = logger.where()[0]
    logger.close()
    assert (sys.excepthook, signal.getsignal(signal.SIGINT)) == (hook, interrupt)

    run_id = json.loads((folder / "run.json").read_text())["swanlab_id"]
    assert command.endswith(f"swanlab/run-*-{run_id}")
    paths = sorted((folder / "swanlab").glob(f"run-*/run-{run_id}.swanlab"))
    found = [Record.FromString(content) for path in paths for content in records(path)]
    starts = [record.start for record in found if record.HasField("start")]
    assert {(start.id, start.project, start.name) for start in starts} == {(run_id, "vla", "runs/mine")}
    scalars = [record.scalar for record in found if record.HasField("scalar")]
    losses = [(each.step, each.value.number) for each in scalars if each.key == "train/loss"]
    assert losses == [(step, pytest.approx(1.0 / step)) for step in (1, 2, 3, 4, 5)]
    assert [each.step for each in scalars if each.key == "eval/success_once"] == [2, 4]
    assert [record.media.key for record in found if record.HasField("media")] == ["eval/video_0"]
    assert "betas" in min(folder.glob("swanlab/run-*/files/config.yaml")).read_text()


def test_trackio_keeps_a_run_on_this_machine(tmp_path, video, monkeypatch, capsys):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    monkeypatch.setenv("HF_TOKEN", "hf_somebody")  # who has logged in is not asked for
    pytest.importorskip("trackio", reason=MISSING.format("trackio"))
    from trackio.sqlite_storage import SQLiteStorage

    used = []
    for name in ("bind", "connect", "connect_ex", "listen"):
        monkeypatch.setattr(socket.socket, name, lambda _, *address: used.append(address))
    folder, chosen = tmp_path / "runs" / "mine", {"trackio": {"project": "vla"}}
    logger = interrupted_twice(folder, chosen)
    logger.log_videos("eval", [video], 5)
    assert logger.where() == ["trackio show --project vla"]
    logger.close()
    assert used == []
    assert capsys.readouterr().out == ""

    [name] = SQLiteStorage.get_runs("vla")
    assert name == "runs/mine-" + json.loads((folder / "run.json").read_text())["trackio_id"]
    rows = SQLiteStorage.get_logs("vla", name)
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(step, 1.0 / step) for step in (1, 2, 3, 4, 5)]
    assert [row["step"] for row in rows if "eval/success_once" in row] == [2, 4]
    assert [row["eval/video_0"]["_type"] for row in rows if "eval/video_0" in row] == ["trackio.video"]

    logger = begin(folder, chosen, after=5)  # as every process of a run begins
    logger.log_settings(SETTINGS)
    logger.log({"x": 1.0}, 6)
    logger.close()
    assert SQLiteStorage.get_run_config("vla", name)["optim"] == SETTINGS["optim"]
