"""Two tasks of the real Meta-World: their instructions survive storage as bytes, and are refused as text."""

import pytest
import torch
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from vla_common import keys
from vla_common.texts import WIDTH, to_strings
from vla_envs import Episode, EpisodeQueue, InstructionsToBytes, list_envs, make_env, make_spec

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")


def test_two_tasks_of_mt50_keep_their_instructions(tmp_path):
    episodes = [Episode(task, 0, task) for task in (7, 31)]
    base = make_env(
        "metaworld/MT50", 2, 5, episodes=EpisodeQueue(episodes), num_workers=2, image_size=32, render_quality="fast"
    )
    try:
        tasks = base.simulator_spec.tasks
        expected = [tasks[task].instruction for task in (7, 31) for _ in range(2)]
        assert len(set(expected)) == 2
        base.reset().memmap_(tmp_path / "observed")  # which changes the texts that it was given
        base.episodes = EpisodeQueue(episodes)
        text = base.rollout(2, break_when_any_done=False)
        assert to_strings(text) == expected
        with pytest.raises(ValueError, match="do not survive"):
            ReplayBuffer(storage=LazyMemmapStorage(4)).extend(text.reshape(-1))

        base.episodes = EpisodeQueue(episodes * 3)
        env = TransformedEnv(base, InstructionsToBytes())
        check_env_specs(env)
        base.episodes = EpisodeQueue(episodes)
        data = env.rollout(2, break_when_any_done=False).reshape(-1)
        for storage in (LazyMemmapStorage, LazyTensorStorage):
            folder = tmp_path / storage.__name__
            saved, loaded = (ReplayBuffer(storage=storage(4)) for _ in range(2))
            saved.extend(data)
            saved.dumps(folder)
            loaded.loads(folder)
            for buffer in (saved, loaded):
                assert to_strings(buffer[:]) == to_strings(buffer[:], (keys.NEXT, keys.TASK_DESCRIPTIONS)) == expected
                assert torch.equal(buffer[:][keys.IMAGES], data[keys.IMAGES])
    finally:
        base.close()


def test_the_instructions_of_all_benchmarks_fit():
    longest = 0
    for name in list_envs():
        try:
            tasks = make_spec(name).tasks
        except (ImportError, FileNotFoundError):  # not installed
            continue
        longest = max(longest, *(len(task.instruction.encode()) for task in tasks))
    assert 0 < longest < WIDTH


@pytest.mark.parametrize("name", ["metaworld/reach-v3+push-v3", "calvin/lh-mtlc"])
def test_what_a_benchmark_of_ours_says_is_what_its_tasks_declare(name, caplog):
    """Sentences that are fixed and of a chain: none is remarked on. ManiSkill's are tested with its other processes."""
    try:
        tasks = make_spec(name).tasks
        env = make_env(name, 1, 4, episodes=EpisodeQueue([Episode(task, 1, 3) for task in range(len(tasks))]))
    except (ImportError, FileNotFoundError) as error:
        pytest.skip(str(error))
    for _ in tasks:
        text = to_strings(env.reset())[0]
        assert text
    env.close()
    assert "observe() returned the instruction" not in caplog.text
