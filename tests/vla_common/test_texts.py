"""Instructions come back as they were: from every storage as bytes, and as text from those that keep it."""

import io

import pytest
import torch
from openvla_checkpoint import make_checkpoint as make_openvla
from pi0_checkpoint import make_checkpoint as make_pi0
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from torchrl.envs import ParallelEnv, TransformedEnv
from torchrl.envs.utils import ExplorationType, check_env_specs, set_exploration_type
from torchrl.objectives.value import GAE
from toy import ToyEnv, ToyPolicy

from vla_algos.ablations import swapped_instructions
from vla_common import keys
from vla_common.texts import WIDTH, decode, encode, to_strings
from vla_envs import InstructionsToBytes, make_spec
from vla_envs.instructions import Instructions
from vla_envs.simulator import Task
from vla_policies import Pi0, SmallFlow, SmallFlowConfig, SmallVLA, SmallVLAConfig, make_example
from vla_policies.openvla import OpenVLA, OpenVLAOFT

FOUR = ("pick up the plate", "push the puck", "", "open the robot’s drawer")
REFUSED = "instructions that are text do not survive .* add InstructionsToBytes"
BOTH = ((keys.TASK_DESCRIPTIONS,), (keys.NEXT, keys.TASK_DESCRIPTIONS))
TEXTS = ["", "go", "the robot’s plate, 10 °C", "子供" * 3, "a" * WIDTH, "°" * (WIDTH // 2)]


class FourTasks(ToyEnv):
    """The toy with an instruction for each of its slots, written as ``VLAEnv`` writes them."""

    def _observe(self, **outcome):
        td = super()._observe(**outcome)
        return td.set(keys.TASK_DESCRIPTIONS, Instructions.of([FOUR[slot % 4] for slot in range(self.num_envs)]))


def four_tasks():
    return FourTasks(4)


def four_tasks_in_bytes():
    return TransformedEnv(FourTasks(4), InstructionsToBytes())


def decisions(env):
    """Twelve decisions of four tasks ``[12]``; those beside each other differ in their instruction."""
    torch.manual_seed(0)
    return env.rollout(3, break_when_any_done=False).transpose(0, 1).reshape(-1)


def same_texts(td):
    return all(to_strings(td, key) == list(FOUR) * 3 for key in BOTH)


# ---- to bytes and back


def test_texts_survive_the_way_to_bytes_and_back():
    encoded = encode(TEXTS)
    assert (encoded.dtype, encoded.shape) == (torch.uint8, (len(TEXTS), WIDTH))
    assert decode(encoded) == TEXTS
    assert bytes(encoded[1].tolist()) == b"go" + bytes(WIDTH - 2)
    assert decode(encoded[2]) == [TEXTS[2]]  # one text is a batch []
    assert decode(encode([])) == []


@pytest.mark.parametrize(
    "value",
    [
        NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d")),
        Instructions(Instructions.of("ab"), Instructions.of("cd")),
        [["a", "b"], ["c", "d"]],
        ("a", "b", "c", "d"),
        encode("abcd").view(2, 2, WIDTH),
        torch.stack([NonTensorStack("a", "c"), NonTensorStack("b", "d")], 1),
    ],
)
def test_every_form_is_read_row_by_row(value):
    assert decode(value) == ["a", "b", "c", "d"]


def test_one_text_for_a_whole_batch_is_read_for_each_of_its_rows():
    td = TensorDict({keys.TASK_DESCRIPTIONS: NonTensorData("go", batch_size=[2, 3])}, [2, 3])
    assert to_strings(td) == ["go"] * 6
    assert to_strings(td[0, 0]) == decode("go") == ["go"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: encode(["°" * 145]), r"has 290 bytes and there is room for 288; use InstructionsToBytes\(width=290\)"),
        (lambda: encode(["a\0"]), "has a character 0, which pads the bytes; leave it out"),
        (lambda: decode(torch.zeros(2, 3)), r"text or uint8 .* got torch.float32 \[2, 3\]"),
        (lambda: decode([1]), "text or uint8 .* got int 1"),
        (lambda: decode(None), "got NoneType"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        call()
    assert "\n" not in str(error.value)


# ---- the transform in environments, collectors and value estimators


def test_the_environment_declares_the_bytes():
    env = four_tasks_in_bytes()
    check_env_specs(env)
    spec = env.observation_spec[keys.TASK_DESCRIPTIONS]
    assert (spec.dtype, spec.shape) == (torch.uint8, (4, WIDTH))
    assert decisions(env)[keys.TASK_DESCRIPTIONS].shape == (12, WIDTH)
    assert same_texts(decisions(env))


def test_bytes_change_nothing_else():
    text, as_bytes = decisions(four_tasks()), decisions(four_tasks_in_bytes())
    assert same_texts(text)
    for td in (text, as_bytes):
        for key in BOTH:
            del td[key]
    assert (text == as_bytes).all()


def test_a_text_that_is_too_long_is_refused_before_anything_is_stepped():
    env = TransformedEnv(FourTasks(4), InstructionsToBytes(width=20))
    with pytest.raises(ValueError, match=r"'open the robot’s drawer'... has 25 bytes and there is room for 20"):
        env.reset()


@pytest.mark.parametrize("compact", [False, True])
def test_collectors_of_torchrl_give_bytes(compact):
    collector = Collector(four_tasks_in_bytes, ToyPolicy(), frames_per_batch=12, total_frames=12, compact_obs=compact)
    (batch,) = list(collector)
    assert to_strings(batch.transpose(0, 1)) == list(FOUR) * 3
    collector.shutdown()


def test_processes_of_torchrl_give_the_same_texts(forked_processes):
    collector = MultiSyncCollector([four_tasks] * 2, ToyPolicy(), frames_per_batch=24, total_frames=24, cat_results=0)
    (batch,) = list(collector)
    collector.shutdown()
    env = ParallelEnv(2, four_tasks)
    rollout = env.rollout(3, break_when_any_done=False)
    env.close()
    assert to_strings(batch.transpose(0, 1)) == list(FOUR) * 6
    assert to_strings(rollout[:, :, 0]) == list(FOUR) * 2
    for td in (batch, rollout):  # the guard goes through processes too
        with pytest.raises(ValueError, match=REFUSED):
            extended(ReplayBuffer(storage=LazyMemmapStorage(24)), td.reshape(-1))


@pytest.mark.parametrize("shifted", [False, True])
def test_value_estimators_run_on_bytes_alone(shifted):
    def mean(instructions):
        return instructions.float().mean(-1, keepdim=True)

    critic = TensorDictModule(mean, in_keys=[keys.TASK_DESCRIPTIONS], out_keys=[keys.STATE_VALUE])
    estimator = GAE(gamma=0.9, lmbda=0.9, value_network=critic, shifted=shifted)
    rollout = four_tasks_in_bytes().rollout(3, break_when_any_done=False)
    expected = encode(FOUR).float().mean(-1)
    assert torch.equal(estimator(rollout)[keys.STATE_VALUE][:, 0, 0], expected)
    with pytest.raises(TypeError, match="isnan"):  # TorchRL asks whether an instruction is a number
        estimator(four_tasks().rollout(3, break_when_any_done=False))


# ---- storages


def extended(buffer, data):
    buffer.extend(data)
    return buffer


def added_one_by_one(buffer, data):
    for row in data:
        buffer.add(row)
    return buffer


@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("fill", [extended, added_one_by_one])
def test_bytes_survive_every_storage(storage, fill):
    assert same_texts(fill(ReplayBuffer(storage=storage(12)), decisions(four_tasks_in_bytes()))[:])


@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
@pytest.mark.parametrize("filled", [False, True])
def test_bytes_survive_saved_buffers(storage, filled, tmp_path):
    data = decisions(four_tasks_in_bytes())
    saved = extended(ReplayBuffer(storage=storage(12)), data)
    saved.dumps(tmp_path)

    def another():
        buffer = ReplayBuffer(storage=storage(12))
        return extended(buffer, data[torch.zeros(12, dtype=torch.int64)]) if filled else buffer

    loaded, stated = another(), another()
    loaded.loads(tmp_path)
    stated.load_state_dict(saved.state_dict())
    assert same_texts(loaded[:])
    assert same_texts(stated[:])


@pytest.mark.parametrize("make", [four_tasks, four_tasks_in_bytes])
def test_memory_maps_and_files_of_torch_keep_both_forms(make, tmp_path):
    data = decisions(make())
    assert same_texts(data.memmap())
    data.memmap(tmp_path)
    assert same_texts(TensorDict.load_memmap(tmp_path))
    torch.save(data, file := io.BytesIO())
    file.seek(0)
    assert same_texts(torch.load(file, weights_only=False))


def test_bytes_need_no_pickle():
    torch.save(decisions(four_tasks_in_bytes()).to_dict(), file := io.BytesIO())
    file.seek(0)
    assert same_texts(TensorDict(torch.load(file, weights_only=True), [12]))


@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
def test_a_buffer_stores_bytes_for_texts(storage):
    data = decisions(four_tasks())
    buffer = extended(ReplayBuffer(storage=storage(12), transform=InstructionsToBytes(), batch_size=12), data)
    assert buffer[:][keys.TASK_DESCRIPTIONS].dtype == torch.uint8
    assert same_texts(buffer[:])
    assert set(to_strings(buffer.sample())) <= set(FOUR)
    assert same_texts(data)
    assert not isinstance(data.get(BOTH[1]), torch.Tensor)  # what was given stays text


# ---- the guard: where text does not survive it is refused, and where it does it is not


def dump(buffer, data, folder):
    extended(buffer, data).dumps(folder)


@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 2, 3)])
@pytest.mark.parametrize(
    "store",
    [
        lambda data, _: extended(ReplayBuffer(storage=LazyMemmapStorage(12)), data),
        lambda data, folder: extended(ReplayBuffer(storage=LazyMemmapStorage(12, scratch_dir=folder)), data),
        lambda data, _: added_one_by_one(ReplayBuffer(storage=LazyMemmapStorage(12)), data),
        lambda data, folder: dump(ReplayBuffer(storage=LazyTensorStorage(12)), data, folder),
        lambda data, _: extended(ReplayBuffer(storage=LazyTensorStorage(12)), data).state_dict(),
        lambda data, _: extended(ReplayBuffer(storage=ListStorage(12)), data).state_dict(),
        lambda data, _: data.state_dict(),
    ],
)
def test_text_is_refused_where_it_would_come_back_as_another(store, shape, tmp_path):
    with pytest.raises(ValueError, match=REFUSED) as error:
        store(decisions(four_tasks()).reshape(shape), str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda td: td.clone(),
        lambda td: td[torch.arange(12)],
        lambda td: td[td[keys.TASK_ID] >= 0],
        lambda td: torch.stack(list(td)),
        lambda td: torch.cat([td[:6], td[6:]]),
        lambda td: td.select(keys.TASK_DESCRIPTIONS),
        lambda td: td.view(3, 4).transpose(0, 1),
        lambda td: td.to("cpu"),
        lambda td: td[:1].expand(12),
        lambda td: td.consolidate(),
        lambda td: TensorDict({}, [12]).update(td),
    ],
)
def test_the_guard_survives_what_is_done_to_a_rollout(change):
    with pytest.raises(ValueError, match=REFUSED):
        extended(ReplayBuffer(storage=LazyMemmapStorage(12)), change(decisions(four_tasks())))


@pytest.mark.parametrize("compact", [False, True])
def test_the_guard_survives_collectors(compact):
    collector = Collector(four_tasks, ToyPolicy(), frames_per_batch=12, total_frames=12, compact_obs=compact)
    for batch in collector:
        with pytest.raises(ValueError, match=REFUSED):
            extended(ReplayBuffer(storage=LazyMemmapStorage(12)), batch.reshape(-1))
    collector.shutdown()


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("fill", [extended, added_one_by_one])
def test_live_storages_keep_text(storage, fill):
    assert same_texts(fill(ReplayBuffer(storage=storage(12)), decisions(four_tasks()))[:])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", [(), (12,), (3, 4)])
def test_files_of_text_are_read_without_this_library(shape, in_place, tmp_path):
    td = decisions(four_tasks())
    td = (td.reshape(shape) if shape else td[3]).select(keys.TASK_DESCRIPTIONS).clone()
    expected = to_strings(td)
    assert to_strings((td.memmap_ if in_place else td.memmap)(tmp_path)) == expected
    assert to_strings(TensorDict.load_memmap(tmp_path)) == expected
    assert not any("vla_envs" in file.read_text() for file in tmp_path.rglob("*.json"))


# ---- the reason of the guard: the day one of these passes, the page, and then the guard, can go


def plain():
    return TensorDict({keys.TASK_DESCRIPTIONS: NonTensorStack(*FOUR), keys.STATES: torch.arange(4.0)}, [4])


def unchanged(buffer):
    return to_strings(buffer[:]) == list(FOUR)


@pytest.mark.xfail(strict=True, reason="TorchRL 0.14.1: docs/explanation/nontensor-storage.md")
def test_upstream_keeps_text_in_a_memory_map():
    assert unchanged(extended(ReplayBuffer(storage=LazyMemmapStorage(4)), plain()))


@pytest.mark.xfail(strict=True, reason="tensordict 0.14.3: docs/explanation/nontensor-storage.md")
def test_upstream_keeps_text_in_dumped_buffers(tmp_path):
    extended(ReplayBuffer(storage=LazyTensorStorage(4)), plain()).dumps(tmp_path)
    loaded = ReplayBuffer(storage=LazyTensorStorage(4))
    loaded.loads(tmp_path)
    assert unchanged(loaded)


@pytest.mark.xfail(strict=True, reason="tensordict 0.14.3: docs/explanation/nontensor-storage.md")
def test_upstream_keeps_text_in_a_state_dict():
    state = extended(ReplayBuffer(storage=LazyTensorStorage(4)), plain()).state_dict()
    loaded = extended(ReplayBuffer(storage=LazyTensorStorage(4)), plain()[torch.zeros(4, dtype=torch.int64)])
    loaded.load_state_dict(state)
    assert unchanged(loaded)


# ---- who reads


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        "openvla": make_openvla(tmp_path_factory.mktemp("openvla")),
        "oft": make_openvla(tmp_path_factory.mktemp("oft"), heads=True, value_head=True),
        **{name: make_pi0(tmp_path_factory.mktemp(name), name) for name in ("pi0_tiny", "pi05_tiny")},
    }


BOUNDS = {"action_low": (-1.0,) * 4, "action_high": (1.0,) * 4, "state_dim": 4}
OFT = {"benchmark": "libero", "head": "tokens", "layout": "official", "use_proprio": False}
PI0 = {"benchmark": "metaworld", "config_name": "pi0_metaworld"}
POLICIES = {
    "small": ("metaworld", lambda _: SmallVLA(SmallVLAConfig(**BOUNDS))),
    "small_flow": ("metaworld", lambda _: SmallFlow(SmallFlowConfig(**BOUNDS))),
    "openvla": ("libero", lambda found: OpenVLA.from_pretrained(found["openvla"], benchmark="libero")),
    "openvla_oft": ("libero", lambda found: OpenVLAOFT.from_pretrained(found["oft"], **OFT)),
    "pi0": ("metaworld", lambda found: Pi0.from_pretrained(found["pi0_tiny"], **PI0)),
    "pi05": (
        "metaworld",
        lambda found: Pi0.from_pretrained(found["pi05_tiny"], **(PI0 | {"config_name": "pi05_metaworld"})),
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_policies_do_the_same_bit_by_bit_from_bytes_as_from_text(name, folders):
    benchmark, make = POLICIES[name]
    torch.manual_seed(0)
    policy, acted = make(folders), []
    texts = ["push the puck", "open the drawer"]
    for instructions in (NonTensorStack(*texts), Instructions.of(texts), encode(texts)):
        torch.manual_seed(1)
        seen = make_example(benchmark, batch_size=2).set(keys.TASK_DESCRIPTIONS, instructions)
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            acted.append(policy(seen).select(*policy.out_keys, strict=False))
    text, guarded, as_bytes = acted
    assert not torch.equal(text[keys.PROMPT_TOKENS][0], text[keys.PROMPT_TOKENS][1])
    assert {keys.ACTION, keys.ACTION_LOG_PROB} <= set(text.keys())
    for key in text.keys():  # noqa: SIM118
        assert torch.equal(text[key], guarded[key]), key
        assert torch.equal(text[key], as_bytes[key]), key


@pytest.mark.parametrize("instructions", [NonTensorStack("a", "b", ""), encode(["a", "b", ""])])
def test_swapped_instructions_keep_their_form(instructions):
    td = TensorDict({keys.TASK_DESCRIPTIONS: instructions}, [3])
    swapped = swapped_instructions([Task("1", "a"), Task("2", "b")])(td)
    assert to_strings(swapped) == ["b", "a", ""]
    assert type(swapped.get(keys.TASK_DESCRIPTIONS)) is type(instructions)


def test_each_sentence_of_a_task_is_swapped():
    tasks = make_spec("calvin/open_drawer+close_drawer", sentences="training").tasks  # about ten sentences each
    said = [text for task in tasks for text in task.instructions]
    td = TensorDict({keys.TASK_DESCRIPTIONS: NonTensorStack(*said)}, [len(said)])
    swapped = to_strings(swapped_instructions(tasks)(td))
    half = len(tasks[0].instructions)
    assert set(swapped[:half]) <= set(tasks[1].instructions)
    assert set(swapped[half:]) <= set(tasks[0].instructions)


def test_instructions_that_each_episode_words_anew_are_not_swapped():
    with pytest.raises(ValueError, match="each episode of lift_pot has its own; type ablation=other_trial"):
        swapped_instructions(make_spec("robotwin/lift_pot+click_bell").tasks)


def test_instructions_that_no_task_has_are_not_swapped_silently():
    swap = swapped_instructions([Task("1", "click bell", instructions=("click it",)), Task("2", "lift pot")])
    for told in (["tap the small bell", "tap it"], ["click it", "tap the small bell"]):  # neither some of them
        td = TensorDict({keys.TASK_DESCRIPTIONS: NonTensorStack(*told)}, batch_size=[2])
        with pytest.raises(ValueError, match="such as 'tap the small bell'; take another ablation"):
            swap(td)
    idle = TensorDict({keys.TASK_DESCRIPTIONS: NonTensorStack("click bell", "")}, batch_size=[2])
    assert to_strings(swap(idle)) == ["click bell", ""]
