"""Several processes save together and resume where they stopped, as many of them or another number, or one dies."""

import os
import shutil
import signal
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from decisions import decisions
from forked import together
from openvla_checkpoint import make_checkpoint as make_openvla
from safetensors.torch import load_file
from tiny_policies import adapted, openvla, small, small_flow
from torch.distributed.tensor import DTensor

import vla_algos.run.checkpoints as checkpoint_module
from vla_algos import distributed
from vla_algos.learner import Learner
from vla_algos.losses import ChunkClipPPOLoss
from vla_algos.run.checkpoints import CheckpointError, by_preference, checkpoints, open_checkpoint
from vla_algos.run.run import Run
from vla_algos.run.saving import Saver
from vla_policies import load_policy
from vla_policies.sharding import shard, trained_tensors

pytestmark = pytest.mark.timeout(600)
KINDS = {  # policy, and settings of its loss
    "small, with a reference": (small, {"reference_kl_coeff": 0.1}),
    "flow": (small_flow, {"entropy_coeff": 0.0}),
    "an adapter, with a reference": (adapted(openvla), {"reference_kl_coeff": 0.1}),
}
SMALL, FLOW, ADAPTER = KINDS
CASES = [(SMALL, 1), (SMALL, 2), (FLOW, 1), (ADAPTER, 2)]


class Episodes:
    """The part of a run that each process has for itself: how often it has drawn, and what."""

    def __init__(self):
        self.drawn, self.last = 0, torch.zeros(2)

    def draw(self):
        self.drawn, self.last = self.drawn + 1, torch.rand(2)

    def state_dict(self):
        return {"drawn": self.drawn, "last": self.last, "by": distributed.rank(), "kept": ("a", {3: None})}

    def load_state_dict(self, state):
        assert state["by"] == distributed.rank()
        assert state["kept"] == ("a", {3: None})
        self.drawn, self.last = state["drawn"], state["last"]


def live(kind, folder, root, last, shards=None, elastic=False, during=lambda iteration: None):
    """A run until its ``last`` iteration, from where it stopped: everything that it has then, put together."""
    torch.manual_seed(0)
    make, settings = KINDS[kind]
    policy = make(folder)
    batch = decisions(policy, 8, seed=3)
    if shards is not None:
        shard(policy, distributed.device_mesh(shards))
    learner = Learner(ChunkClipPPOLoss(policy, **settings), lr=3e-3, minibatch_size=4, max_log_ratio=None)
    episodes = Episodes()
    torch.manual_seed(1 + distributed.rank())
    parts = {"policy": policy, "learner": learner, "collector": episodes}
    saver = Saver(root / "checkpoints", elastic)
    saved = saver.restore(parts) or {"iteration": None, "draws": []}
    first, draws = saved["iteration"], saved["draws"]
    at_first = None if first is None else everything(policy, learner, episodes)
    for iteration in range((first or 0) + 1, last + 1):
        episodes.draw()
        during(iteration)
        learner.update(batch[distributed.rank() :: distributed.world_size()].clone())
        draws = [*draws, iteration]
        publish = policy.save_pretrained if kind == SMALL and iteration == 2 else None
        saver.save(iteration, parts, {"iteration": iteration, "draws": draws}, publish)
    saver.wait()
    return {"first": first, "at first": at_first, "state": draws, **everything(policy, learner, episodes)}


def everything(policy, learner, episodes):
    learner = learner.state_dict()
    return {
        "weights": whole(trained_tensors(policy)),
        "moments": [whole(entries) for entries in learner["optimizer"]["state"].values()],
        "reference": whole(learner.get("reference", {})),
        "steps": (learner["steps"], learner["scheduler"]["last_epoch"]),
        "episodes": (episodes.drawn, episodes.last.tolist()),
        "random": peek(),
    }


def peek():
    """The next random numbers, which stay the next."""
    with torch.random.fork_rng():
        return torch.rand(2).tolist()


def whole(tensors):
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in tensors.items()
    }


def same(one, other, names=("weights", "moments", "reference", "steps", "episodes")):
    for name in names:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


def several(folder, root):
    """Whole runs, runs that stop and go on, and such that one process has begun."""
    found = {}
    for kind, shards in CASES:
        case = root / f"{kind} {shards}"
        run = partial(live, kind, folder, shards=shards)
        found[kind, shards] = {"whole": run(case / "whole", 4), "stopped": run(case / "stopped", 2)}
        if distributed.is_main():
            shutil.copytree(case / "stopped", case / "copied", symlinks=True)
        distributed.barrier()
        found[kind, shards] |= {"on": run(case / "stopped", 4), "from one": run(case / "from one", 3, elastic=True)}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    make_openvla(folder / "openvla")
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(folder, root):
    """Runs of a single process, which two go on with."""
    found = {}
    for kind in KINDS:
        found[kind] = live(kind, folder, root / kind / "one", 2)
    for kind, shards in CASES:
        shutil.copytree(root / kind / "one", root / f"{kind} {shards}" / "from one", symlinks=True)
    return found


@pytest.fixture(scope="module")
def results(folder, root, alone, tmp_path_factory):
    """What each process found; one start of the processes for all cases."""
    return together(several, tmp_path_factory.mktemp("found"), folder, root, patience=500)


@pytest.mark.parametrize("case", CASES)
def test_as_many_processes_go_on_bit_by_bit(case, results):
    for rank, found in enumerate(results):
        stopped, on, expected = (found[case][name] for name in ("stopped", "on", "whole"))
        assert on["first"] == 2
        same(on["at first"], stopped)
        same(on, expected, [*set(expected) - {"first", "at first"}])
        assert on["state"] == [1, 2, 3, 4]
        assert expected["moments"]
        assert bool(expected["reference"]) == ("reference" in case[0])
        same(expected, results[0][case]["whole"], ["weights", "moments", "reference", "steps"])
        assert (expected["episodes"] == results[0][case]["whole"]["episodes"]) == (rank == 0)


@pytest.mark.parametrize("case", CASES)
def test_one_process_goes_on_from_two_and_two_from_one(case, folder, root, alone, results, capsys):
    kind, shards = case
    copied, two = root / f"{kind} {shards}" / "copied", results[0][case]["stopped"]
    with pytest.raises(CheckpointError, match=r"is of 2 processes, this run has 1: resume with .*resume=elastic \("):
        live(kind, folder, copied, 2)
    weights = whole(trained_tensors(KINDS[kind][0](folder)))
    assert any(not torch.equal(weights[name], two["weights"][name]) for name in weights)
    found = live(kind, folder, copied, 2, elastic=True)
    same(found, two, ["weights", "moments", "reference", "steps"])
    assert found["episodes"] == (0, [0.0, 0.0])
    assert found["state"] == [1, 2]
    said = capsys.readouterr().out
    assert said.count("processes") == 1
    assert (
        "step_00000002 is of 2 processes, this run has 1: weights and optimizer continue, episodes and random numbers "
        "begin again"
    ) in said

    from_one = [found[case]["from one"] for found in results]
    for each in from_one:
        assert each["first"] == 2
        same(each["at first"], alone[kind], ["weights", "moments", "reference", "steps"])
        assert each["at first"]["episodes"] == (0, [0.0, 0.0])
        assert each["state"] == [1, 2, 3]
    assert from_one[0]["episodes"][1] != from_one[1]["episodes"][1]


def restored(folder, save=False):
    """The next random numbers of a run after it is restored."""
    config = SimpleNamespace(
        recipe="ppo", seed=0, resume="elastic", checkpoint_every=1, logger={}, iterations=3, policy={}
    )
    policy = torch.nn.Linear(1, 1)
    with Run(config, folder) as run:
        run.restore(policy=policy, optimizer=torch.optim.SGD(policy.parameters(), 0.1))
        if save:
            run.save(1)
    return torch.rand(3).tolist()


def test_processes_of_an_elastic_resume_draw_numbers_of_their_own(tmp_path):
    restored(tmp_path / "run", save=True)
    first, second = together(restored, tmp_path, tmp_path / "run")
    assert first != second


@pytest.mark.parametrize("shards", [1, 2])
def test_what_two_write(shards, root, results):
    """Each its part of what is sharded, once, and no file twice; the policy's folder is one that loads."""
    checkpoint = by_preference(root / f"{SMALL} {shards}" / "copied" / "checkpoints")[0]
    assert [path.name for path in checkpoints(checkpoint.parent)] == ["step_00000001", "step_00000002"]
    files = sorted((checkpoint / "tensors").iterdir())
    assert [path.name for path in files] == ["process_00000.safetensors", "process_00001.safetensors"]
    first, second = (load_file(path) for path in files)
    common = [{name for name in each if not name.startswith("process_")} for each in (first, second)]
    assert len(common[0]) > 200
    assert len(common[1]) > 100 if shards == 2 else not common[1]
    for name in common[0] & common[1]:
        assert abs(len(first[name]) - len(second[name])) <= 1
    found = results[0][SMALL, shards]["stopped"]
    saved = load_policy(checkpoint / "policy").state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in found["weights"].items())
    assert not list(checkpoint.parent.glob(".unfinished*"))


# Death


def kill_in(iteration, now):
    if now == iteration:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_while_learning(kind, folder, root, shards):
    live(kind, folder, root, 4, shards, during=partial(kill_in, 3))


def killed_while_saving(kind, folder, root, shards):
    """The second process dies when the first has written its part of the third checkpoint."""
    write = checkpoint_module._write_part

    def dies(temporary, snapshot):
        third = temporary.name.endswith("3")
        while third and distributed.rank() and not (temporary / "tensors" / "process_00000.safetensors").exists():
            time.sleep(0.01)
        written = write(temporary, snapshot)
        if third and distributed.rank():
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    checkpoint_module._write_part = dies
    live(kind, folder, root, 60, shards)


@pytest.mark.parametrize(
    ("kill", "ends", "shards"), [(killed_while_learning, (-9, -9), 2), (killed_while_saving, (1, -9), 1)]
)
def test_a_run_that_was_killed_goes_on(kill, ends, shards, folder, tmp_path, results):
    together(kill, tmp_path, SMALL, folder, tmp_path / "run", shards, ends=ends, patience=60)
    root = tmp_path / "run" / "checkpoints"
    last = open_checkpoint(by_preference(root)[0]).step
    assert last in ((1, 2) if kill is killed_while_learning else (2,))  # it may have been under way
    on = together(live, tmp_path, SMALL, folder, tmp_path / "run", 4, shards)
    for each, found in zip(on, results, strict=True):
        assert each["first"] == last
        same(each, found[SMALL, shards]["whole"])
    assert not list(root.glob(".unfinished*"))


def damaged_in_between(kind, folder, root, shards):
    """What tells of the second checkpoint has another shape in it: only one of two compares it with its digest."""
    live(kind, folder, root, 2, shards)
    if distributed.is_main():
        file = root / "checkpoints" / "step_00000002" / "training.json"
        file.write_text(file.read_text().replace('"shape": [1', '"shape": [2', 1))
    distributed.barrier()
    return live(kind, folder, root, 3, shards)


def test_what_one_process_finds_damaged_no_other_reads(folder, tmp_path):
    found = together(damaged_in_between, tmp_path, SMALL, folder, tmp_path / "run", 2)
    assert [each["first"] for each in found] == [1, 1]


def fails_to_write(kind, folder, root, shards):
    """The disk of the second process is full in the second iteration."""
    write, calls = checkpoint_module.write_safetensors, []

    def full(*given):
        calls.append(1)
        if distributed.rank() and len(calls) == 2:
            raise OSError(28, "No space left on device")
        write(*given)

    checkpoint_module.write_safetensors = full
    with pytest.raises(OSError, match=r"step_00000002 could not be written: \[Errno 28\] No space left on device"):
        live(kind, folder, root, 60, shards)
    return "heard"


def test_what_one_process_cannot_write_all_hear(folder, tmp_path):
    assert together(fails_to_write, tmp_path, SMALL, folder, tmp_path / "run", 2) == ["heard"] * 2
    assert open_checkpoint(by_preference(tmp_path / "run" / "checkpoints")[0]).step == 1
