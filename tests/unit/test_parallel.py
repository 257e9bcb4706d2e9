"""Several processes that learn together learn what one would learn alone, and hear of one that is lost."""

import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from toy import ToyActorCritic, ToyEnv

from vla_algos import parallel
from vla_algos.advantages import gae
from vla_algos.collectors import StepCollector
from vla_algos.evaluation import EpisodeResult, EvaluationResult
from vla_algos.heartbeat import ProcessLost
from vla_algos.learner import Learner
from vla_algos.losses import ChunkClipPPOLoss
from vla_common.keys import ADVANTAGE, NEXT, STATE_VALUE, VALUE_TARGET
from vla_envs.simulator import Episode

pytestmark = pytest.mark.timeout(600)
UPDATES = {
    "every token": {},
    "every trajectory": {"aggregation": "trajectory_mean"},
    "until the KL is too large": {"target_kl": 0.003, "epochs": 20},
    "so many steps": {"minibatch_size": None, "minibatches": 3},
    "the critic first": {"critic_warmup_steps": 3},
}
SPLITS = {
    "halves": [slice(0, 3), slice(3, 6)],
    "a part and the rest": [slice(0, 1), slice(1, 6)],
    "all and nothing": [slice(0, 6), slice(6, 6)],
}


def together(work, folder, *arguments, processes=2, ends=(0, 0), each=lambda running: None, seconds=240):
    """The results of ``work(*arguments)`` in processes that know of each other, by rank; ``each`` sees them end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    running = [
        context.Process(target=_one, args=(rank, processes, port, folder, work, arguments), daemon=True)
        for rank in range(processes)
    ]
    try:
        for process in running:
            process.start()
        each(running)
        for process in running:
            process.join(seconds)
        assert [process.exitcode for process in running] == list(ends)
    finally:
        for process in running:
            process.kill()
    found = [folder / f"{rank}.pt" for rank in range(processes)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in found]


def _one(rank, processes, port, folder, work, arguments):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    with parallel.process_group():
        torch.save(work(*arguments), folder / f"{rank}.pt")


def collected():
    """A policy, and 42 decisions of 6 environments, of which one was never executed."""
    torch.manual_seed(0)
    policy = ToyActorCritic()
    return policy, StepCollector(ToyEnv(6, crashes={1: 1}), policy, 7).rollout()


def learn(settings, rows):
    """Three updates of this process's rows: weights, metrics and advantages."""
    policy, batch = collected()
    batch = batch[rows[parallel.rank()]]
    outcomes = parallel.all_gather(batch.select(NEXT, STATE_VALUE))
    gae(outcomes)
    batch.update(parallel.local_rows(outcomes, len(batch)).select(ADVANTAGE, VALUE_TARGET))
    loss = ChunkClipPPOLoss(policy, entropy_coeff=0.01, reference_kl_coeff=0.1)
    settings = {"epochs": 2, "minibatch_size": 16, "max_log_ratio": 10.0, **settings}
    learner = Learner(loss, lr=3e-3, **settings)
    torch.manual_seed(1 + parallel.rank())  # the order of decisions is the first process's
    seen = [learner.update(batch.clone() if len(batch) else None) for _ in range(3)]
    return dict(policy.state_dict()), seen, outcomes[ADVANTAGE]


def exchange():
    return {
        "objects": parallel.all_gather_object(f"of {parallel.rank()}"),
        "largest": parallel.all_reduce_max(parallel.rank() * 7),
        "main": parallel.broadcast_object(parallel.rank()),
        "share": parallel.per_rank(6, "env.num_envs"),
    }


def learn_everything():
    learnt = {(name, split): learn(UPDATES[name], rows) for name in UPDATES for split, rows in SPLITS.items()}
    return learnt, exchange()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What was learnt and exchanged, by rank; one start of the processes for all cases."""
    return together(learn_everything, tmp_path_factory.mktemp("learnt"))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", UPDATES)
def test_two_processes_learn_what_one_learns(name, split, results):
    alone = learn(UPDATES[name], [slice(0, 6)])
    found = [learnt[name, split] for learnt, _ in results]
    for weights, seen, advantages in found:
        torch.testing.assert_close(advantages, alone[2], rtol=0, atol=0)
        for key, value in alone[0].items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-6)
        for one, other in zip(seen, alone[1], strict=True):
            assert one == {key: pytest.approx(value, abs=1e-5, nan_ok=True) for key, value in other.items()}
    assert all(torch.equal(found[0][0][key], found[1][0][key]) for key in alone[0])


def test_what_is_exchanged(results):
    expected = {"objects": ["of 0", "of 1"], "largest": 7, "main": 0, "share": 3}
    assert [exchanged for _, exchanged in results] == [expected, expected]
    alone = {"objects": ["of 0"], "largest": 0, "main": 0, "share": 6}
    assert exchange() == alone


def together_then(wait):
    """Wait once all processes have come together: nobody hears of the fault while still joining."""
    parallel.barrier()
    wait()


def die_in_one():
    if parallel.rank() == 1:
        together_then(lambda: os._exit(0))  # without a word
    return lost_in(lambda: together_then(parallel.barrier))


def lost_in(wait):
    started = time.monotonic()
    with pytest.raises(ProcessLost) as caught:
        wait()
    assert time.monotonic() - started < 30
    return str(caught.value)


def test_the_others_hear_of_a_process_that_died(tmp_path):
    said, _ = together(die_in_one, tmp_path)
    assert "process 1 of 2 (" in said
    assert "has ended without a word: it was killed (out of memory?), or its network failed" in said


def raise_in_one():
    def fail():
        raise ArithmeticError("enough\nof this")

    if parallel.rank() == 1:
        together_then(fail)
    return lost_in(lambda: together_then(lambda: time.sleep(60)))  # somewhere in Python, not in a collective


def test_the_others_hear_what_went_wrong_wherever_they_are(tmp_path):
    said, _ = together(raise_in_one, tmp_path, ends=(0, 1))
    assert said.endswith(") has failed: ArithmeticError: enough")


def stop_in_one(folder):
    if parallel.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        (folder / "written").touch()
    parallel.barrier()


def test_a_stopped_process_ends_the_others_and_writes_nothing_when_it_continues(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("VLA_HEARTBEAT_TIMEOUT", "2")

    def go_on(running):
        running[0].join(60)
        os.kill(running[1].pid, signal.SIGCONT)

    together(stop_in_one, tmp_path, tmp_path, ends=(1, 1), each=go_on)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: process 1 of 2 (")]
    assert lines
    assert all(
        "has given no sign of life for 2 s: it was stopped, or its machine or network failed" in line for line in lines
    )
    assert not (tmp_path / "written").exists()


def stop_shortly():
    parallel.barrier()
    if parallel.rank() == 1:
        if os.fork() == 0:  # somebody else wakes it up
            time.sleep(1)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    parallel.barrier()
    time.sleep(5 * parallel.rank())  # longer than the time-out, alive
    parallel.barrier()
    with parallel._heartbeat.waiting("what all wait for"):
        time.sleep(5)
    return parallel.all_gather_object(parallel.rank())


def test_a_process_that_is_alive_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_HEARTBEAT_TIMEOUT", "4")
    assert together(stop_shortly, tmp_path) == [[0, 1], [0, 1]]


def make_other_calls():
    if parallel.rank() == 1:
        return lost_in(parallel.barrier)
    return lost_in(lambda: parallel.all_reduce_max(1))


def wait_for_each_other():
    def wait():
        with parallel._heartbeat.waiting(f"call {parallel.rank()}"):
            time.sleep(60)

    return lost_in(wait)


def test_calls_that_do_not_belong_together(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_HEARTBEAT_TIMEOUT", "2")
    for said in together(make_other_calls, tmp_path):
        assert "the processes do not make the same calls in the same order: all_reduce_max of" in said
    for said in together(wait_for_each_other, tmp_path):
        assert said.startswith("the processes wait for each other: process 0 in call 0, process 1 in call 1; all must")


def test_a_process_dies_with_its_parent():
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        if os.fork() == 0:
            parallel._die_with_parent()
            os.write(writing, f"{os.getpid()}\n".encode())
        time.sleep(60)
        os._exit(0)
    child = int(os.read(reading, 100))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_whose_torchrun_is_gone_says_so_at_once(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(ProcessLost, match="torchrun, which has started this process, is gone from"):
        parallel._find_agent()


@pytest.mark.parametrize(("gpus", "chosen"), [(1, []), (2, [1]), (8, [1])])
def test_each_process_has_a_gpu(gpus, chosen, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    parallel._choose_gpu(1, gpus)
    assert seen == chosen
    with pytest.raises(ValueError, match="process 9 of this machine has no GPU, there are 8: start as many processes"):
        parallel._choose_gpu(9, 8)


def test_results_of_an_evaluation_are_put_together():
    grid = [EpisodeResult(Episode(0, trial, 1), "reach", bool(trial % 2), False, 0.0, trial) for trial in range(5)]
    videos = {place: torch.full((1,), place).numpy() for place in range(5)}
    parts = [
        EvaluationResult(grid[rank::2], {place // 2: videos[place] for place in range(rank, 3, 2)}) for rank in (0, 1)
    ]
    whole = EvaluationResult.interleaved(parts)
    assert whole.episodes == grid
    assert whole.videos == {place: videos[place] for place in range(3)}
