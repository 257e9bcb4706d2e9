"""A policy behind a websocket: what it answers is what it computes here; strangers, breaks and silence end nothing."""

import asyncio
import contextlib
import io
import re
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import NonTensorStack, TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type
from toy import CHUNK, DIM, INSTRUCTIONS, ToyEnv
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from vla_algos import evaluate
from vla_common.keys import ACTION, IMAGES, STATES, TASK_DESCRIPTIONS
from vla_envs.simulator import Episode
from vla_policies import SmallVLA, SmallVLAConfig, make_policy, serving
from vla_policies.remote.connections import ServerError
from vla_policies.remote.wire import LARGEST, complete_names, from_message, pack, to_message, unpack
from vla_policies.serving import PolicyServer

BOUNDS = {"action_low": (-1.0,) * DIM, "action_high": (1.0,) * DIM}
TASKS = ToyEnv(1).simulator_spec.tasks
SHAPE = SimpleNamespace(id="toy", benchmark="toy", tasks=TASKS, state_dim=3, image_shape=(32, 32), **BOUNDS)
vars(SHAPE).update(wrist_image_shape=None, chain_length=1, protocol_deviations=())
GRID = [Episode(task_id=i % 2, trial_id=100 + i, seed=1) for i in range(12)]


def small():
    torch.manual_seed(3)
    config = SmallVLAConfig(state_dim=3, chunk_size=CHUNK, dim=16, heads=2, compute="float32", **BOUNDS)
    return SmallVLA(config).eval()


class Served:
    """A server in a thread of this process, which can be stopped and started again at its port."""

    def __init__(self, port=0, **options):
        self.server = PolicyServer(small(), **options)
        self.loop, started = asyncio.new_event_loop(), threading.Event()

        async def run():
            ready = self.loop.create_future()
            ready.add_done_callback(lambda _: started.set())
            self.task = asyncio.ensure_future(self.server.run("127.0.0.1", port, ready))
            self.port = await ready
            with contextlib.suppress(asyncio.CancelledError):
                await self.task

        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(run()))
        self.thread.start()
        assert started.wait(20)

    @property
    def url(self):
        return f"ws://127.0.0.1:{self.port}"

    def stop(self):
        self.loop.call_soon_threadsafe(self.task.cancel)
        self.thread.join(20)


@pytest.fixture
def served(request):
    found = Served(**getattr(request, "param", {}))
    yield found
    found.stop()


def remote(url, **settings):
    return make_policy(SHAPE, family="server", url=url, **{"timeout": 20.0, **settings})


def observations(number):
    generator = torch.Generator().manual_seed(1)
    found = TensorDict(batch_size=[number])
    found[IMAGES] = torch.randint(0, 256, (number, 32, 32, 3), dtype=torch.uint8, generator=generator)
    found[STATES] = torch.rand(number, 3, generator=generator)
    found[TASK_DESCRIPTIONS] = NonTensorStack(*[INSTRUCTIONS[i % 2] for i in range(number)])
    return found


def greedy(policy, batch):
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        return policy(batch.clone())[ACTION]


def toy_env(number):
    env = ToyEnv(number)
    env.simulator_spec = SHAPE
    return env


def results(policy, env=None):
    return evaluate(env or toy_env(4), policy, GRID).episodes


def one(number=0):
    """An observation as a client of openpi sends it."""
    row = observations(4)[number]
    rows = {IMAGES: row[IMAGES].numpy(), STATES: row[STATES].numpy(), TASK_DESCRIPTIONS: INSTRUCTIONS[number % 2]}
    return to_message(rows, complete_names("openpi", None))


def asked(client, content):
    client.send(pack(content))
    return unpack(client.recv(timeout=20))["actions"]


# ---- messages


@pytest.mark.parametrize("text_keys", [False, True])
def test_arrays_survive_a_message(text_keys):
    arrays = {"a": np.arange(6, dtype=np.uint8).reshape(2, 3), "b": np.zeros((0, 2), np.float32), "c": np.bool_(True)}
    found = unpack(pack({"inside": [arrays], "text": "é"}, text_keys=text_keys))
    assert found["text"] == "é"
    for name, array in arrays.items():
        again = found["inside"][0][name]
        assert np.array_equal(again, array)
        assert getattr(again, "dtype", bool) in (array.dtype, bool)


def black(side):
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return file.getvalue()


def array(**changes):
    return {"__ndarray__": True, "data": b"\0" * 8, "dtype": "<f4", "shape": [2], **changes}


@pytest.mark.parametrize(
    "content",
    [
        "text",
        b"\xc1",
        msgpack.packb([1, 2])[:-1],
        msgpack.packb(msgpack.ExtType(7, b"x")),
        msgpack.packb({1: 2}),
        b"\x91" * 100_000,
        msgpack.packb(array(dtype="|O8")),
        msgpack.packb(array(dtype="<f4,<f4")),
        msgpack.packb(array(dtype="V8")),
        msgpack.packb(array(shape=[3])),
        msgpack.packb(array(shape=[-1])),
        msgpack.packb(array(shape=[2**31, 2**31, 0])),
        msgpack.packb(array(shape="ab")),
        msgpack.packb({"__ndarray__": True}),
        msgpack.packb({"__image__": True, "format": "png", "data": b"no png", "shape": [2, 2, 3]}),
        msgpack.packb([{}] * 140_000),
        msgpack.packb([{"__image__": True, "format": "png", "data": black(1), "shape": [1, 1, 3]}] * 10_000),
        msgpack.packb([[]] * 140_000),
        msgpack.packb([{"__image__": True, "format": "png", "data": black(3000), "shape": [3000, 3000, 3]}] * 6),
    ],
)
def test_what_is_no_plain_data_is_a_value_error(content):
    with pytest.raises(ValueError, match=r"."):
        unpack(content)


def test_names_lead_into_maps_and_to_each_wrist_camera():
    names = complete_names("vla_eval", {"wrist_images": ["images.left", "images.right"]})
    wrists = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    content = to_message({"wrist_images": wrists, "images": wrists[0], "task_descriptions": "go"}, names)
    assert content["images"].keys() == {"left", "right", "agentview"}
    again = from_message(content, {key: names[key] for key in ("wrist_images", "task_descriptions")})
    assert np.array_equal(again["wrist_images"], wrists)
    with pytest.raises(ValueError, match="did you mean images"):
        complete_names("openpi", {"imags": "x"})


# ---- what is answered


def test_all_environments_in_one_message_are_the_batch_of_this_process(served):
    batch, policy = observations(5), remote(served.url)
    assert policy.chunk_size == CHUNK
    assert torch.equal(greedy(policy, batch), greedy(small(), batch))
    assert served.server.counts["batches"] == 2  # and one of the greeting


def test_an_evaluation_equals_that_of_the_policy_in_this_process_also_if_the_server_is_gone_for_a_while():
    here, served = results(small()), Served()
    policy, port = remote(served.url), served.port
    assert results(policy) == here
    env = toy_env(4)
    step, steps = env._step, []

    def breaking(tensordict):
        nonlocal served
        steps.append(1)
        if len(steps) == 3:
            served.stop()
            threading.Timer(1.5, again).start()
        return step(tensordict)

    def again():
        nonlocal served
        served = Served(port)

    env._step = breaking
    try:
        assert results(policy, env) == here
    finally:
        served.stop()


@pytest.mark.parametrize("served", [{"protocol": "vla_eval"}], indirect=True)
def test_vla_eval_has_one_action_at_a_time_and_forgets_the_rest_of_a_chunk_with_the_episode(served):
    policy = remote(served.url, protocol="vla_eval")
    assert policy.chunk_size == 1
    batch, expected = observations(3), greedy(small(), observations(3))
    where = {"episode_index": torch.tensor([4, -1, 6]), "decision_index": torch.zeros(3, dtype=torch.int64)}
    for step in range(2):
        actions = greedy(policy, batch.clone().update({**where, "decision_index": torch.full((3,), step)}))
        torch.testing.assert_close(actions[[0, 2], 0], expected[[0, 2], step])
        assert not actions[1].any()
    begun = greedy(policy, batch.clone().update({**where, "decision_index": torch.tensor([0, 0, 2])}))
    torch.testing.assert_close(begun[[0, 2], 0], torch.stack([expected[0, 0], expected[2, 2]]))
    other = batch.clone().set(TASK_DESCRIPTIONS, NonTensorStack(*[INSTRUCTIONS[1 - i % 2] for i in range(3)]))
    actions = greedy(policy, other.clone().update({**where, "decision_index": torch.full((3,), 1)}))  # of a chain
    torch.testing.assert_close(actions[[0, 2], 0], greedy(small(), other)[[0, 2], 0])


def test_of_a_longer_chunk_the_first_actions_are_executed(served):
    served.server.metadata["batches"] = False  # as openpi's own
    policy, batch = remote(served.url, num_action_chunks=2), observations(3)
    actions = greedy(policy, batch)
    assert actions.shape == (3, 2, DIM)
    torch.testing.assert_close(actions, greedy(small(), batch)[:, :2])


def test_clients_that_wait_together_are_computed_together():
    served = Served(max_wait=0.5)
    try:
        with ThreadPoolExecutor(4) as pool, contextlib.ExitStack() as stack:
            clients = [stack.enter_context(connect(served.url)) for _ in range(4)]
            for client in clients:
                client.recv()
            answers = list(pool.map(lambda i: asked(clients[i], one(i)), range(4)))
        torch.testing.assert_close(torch.from_numpy(np.stack(answers)), greedy(small(), observations(4)))
        assert served.server.counts["batches"] == 1
    finally:
        served.stop()


def test_pages_say_that_it_lives_and_what_it_did(served):
    remote(served.url)
    health, metrics = (urllib.request.urlopen(f"http{served.url[2:]}/{name}").read() for name in ("health", "metrics"))
    assert b'"status": "ok"' in health
    assert b"vla_policy_decisions 1\n" in metrics


# ---- what goes wrong


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": 3}, "'prompt' must be a text"),
        ({"prompt": []}, "'prompt' must be a text"),
        ({"prompt": "x" * 2001}, "'prompt' must be a text of at most 2000 characters"),
        ({"observation/state": np.zeros(4, np.float32)}, "'observation/state' must be 3 finite numbers for each of 1"),
        ({"observation/state": np.array([0, np.nan, 0])}, "'observation/state' must be 3 finite numbers"),
        ({"observation/state": np.array([0, 0, 1e300])}, "'observation/state' must be 3 finite numbers"),
        (
            {"observation/image": np.zeros((32, 32), np.uint8)},
            r"'observation/image' must be uint8 \[height, width, 3\]",
        ),
        ({"observation/image": np.zeros((0, 32, 3), np.uint8)}, "'observation/image' must be"),
        ({"observation/image": "x"}, "'observation/image' must be"),
        ({"observation/image": np.zeros((32, 32, 3), np.uint16)}, "'observation/image' must be uint8"),
        (
            {"observation/image": np.zeros((5000, 1, 3), np.uint8)},
            "must be .*, at most 4096 a side, for each of 1 texts",
        ),
        ({"prompt": ["go"] * 5000}, "'prompt' must be .*, or a list of at most 4096 of them"),
    ],
)
def test_an_observation_that_does_not_fit_is_said_to_its_client(served, changes, said):
    with connect(served.url) as client:
        client.recv()
        client.send(pack({**one(), **changes}))
        answer = client.recv(timeout=20)
        assert isinstance(answer, str)
        assert re.search(said, answer)
        assert asked(client, one()).shape == (CHUNK, DIM)


def test_what_one_client_says_wrong_is_not_the_others_error():
    served = Served(max_wait=0.5)
    compute = served.server._compute

    def picky(rows):
        if "wrong" in rows[TASK_DESCRIPTIONS]:
            raise ValueError("cannot read it")
        return compute(rows)

    served.server._compute = picky
    contents = [one(0), {**one(1), "prompt": "wrong"}, one(2)]
    try:
        with ThreadPoolExecutor(3) as pool, contextlib.ExitStack() as stack:
            clients = [stack.enter_context(connect(served.url)) for _ in contents]
            for client in clients:
                client.recv()

            def said(client, content):
                client.send(pack(content))
                return client.recv(timeout=20)

            first, second, third = pool.map(said, clients, contents)
        assert second == "ValueError: cannot read it"
        for number, answer in ((0, first), (2, third)):
            expected = greedy(small(), observations(4))[number]
            torch.testing.assert_close(torch.from_numpy(unpack(answer)["actions"]), expected)
    finally:
        served.stop()


def test_what_a_client_that_has_left_asked_for_is_not_computed():
    served, begun, free, computed = Served(), threading.Event(), threading.Event(), []
    compute = served.server._compute

    def slow(rows):
        begun.set()
        assert free.wait(20)
        computed.append(len(rows[TASK_DESCRIPTIONS]))
        return compute(rows)

    served.server._compute = slow
    try:
        with connect(served.url) as first:
            first.recv()
            first.send(pack(one()))
            assert begun.wait(20)
            for _ in range(5):
                with connect(served.url) as leaves:
                    leaves.recv()
                    leaves.send(pack(one(1)))
            free.set()
            first.recv(timeout=20)
            assert asked(first, one()).shape == (CHUNK, DIM)
        assert computed == [1, 1]
    finally:
        free.set()
        served.stop()


def test_a_server_that_comes_back_with_another_policy_is_not_asked():
    served = Served(served="a")
    policy, port = remote(served.url), served.port
    served.stop()
    served = Served(port, served="b")
    try:
        with pytest.raises(ServerError, match="came back with another policy"):
            greedy(policy, observations(2))
    finally:
        served.stop()


def test_a_message_that_is_too_large_is_told_as_such(monkeypatch):
    monkeypatch.setattr(serving, "LARGEST", 100_000)
    served = Served()
    try:
        policy = remote(served.url)
        assert greedy(policy, observations(4)) is not None
        with pytest.raises(ServerError, match=r"takes no message so large; type a smaller env\.num_envs"):
            greedy(policy, observations(40))
    finally:
        served.stop()


def test_strangers_do_not_end_it(served, monkeypatch):
    with connect(served.url, max_size=None) as huge:
        huge.recv()
        with contextlib.suppress(ConnectionClosed):
            huge.send(b"\0" * (LARGEST + 1))
            huge.recv(timeout=20)
    with connect(served.url) as silent, contextlib.ExitStack() as stack:  # one that never reads
        for _ in range(200):
            silent.send(pack(one()))
        for _ in range(200):
            stack.enter_context(connect(served.url))
        with connect(served.url) as client:
            client.recv()
            client.send("text")
            assert "bytes of msgpack" in client.recv(timeout=20)
            assert asked(client, one()).shape == (CHUNK, DIM)
        monkeypatch.setattr(serving, "_CLIENTS", 200)
        with pytest.raises(InvalidStatus, match="503"):
            connect(served.url)
    with connect(served.url) as client:
        client.recv()
        assert asked(client, one()).shape == (CHUNK, DIM)


def test_no_page_in_a_browser_gets_actions(served):
    with pytest.raises(InvalidStatus, match="403"):
        connect(served.url, origin="http://page.example")


def test_a_server_that_is_not_there_or_does_not_fit_is_one_line():
    with pytest.raises(ServerError, match=r"no policy server at ws://127.0.0.1:1 within policy.timeout=0.6 seconds"):
        remote("ws://127.0.0.1:1", timeout=0.6)
    with pytest.raises(ValueError, match=r"policy.url=http://x: must be the address of a server"):
        remote("http://x")
    served = Served()
    try:
        with pytest.raises(ValueError, match=r"answers with \[3, 5\]; must be 9 or more actions of 5 numbers"):
            remote(served.url, num_action_chunks=9)
        with pytest.raises(ServerError, match=r"does not speak vla_eval; set policy\.protocol"):
            remote(served.url, protocol="vla_eval")
        with pytest.raises(ValueError, match=r"policy.checkpoint=x: the weights are the server's; leave it out"):
            remote(served.url, checkpoint="x")
        with pytest.raises(ValueError, match="leave greedy=false out"):
            evaluate(toy_env(2), remote(served.url), GRID, greedy=False)
    finally:
        served.stop()


def test_a_server_that_is_silent_is_waited_for_so_long_and_no_longer(served, monkeypatch):
    policy = remote(served.url, timeout=1.0)
    monkeypatch.setattr(served.server, "_compute", lambda _: threading.Event().wait(2))
    with pytest.raises(ServerError, match=r"no answer at .* within policy.timeout=1 seconds"):
        greedy(policy, observations(2))


def test_a_policy_that_looks_at_more_cameras_than_are_named_is_not_served():
    policy = small()
    policy.num_images = 3
    with pytest.raises(
        ValueError, match="names has 0 wrist cameras, the policy looks at 2; type --names wrist_images=A,B"
    ):
        PolicyServer(policy)


def test_the_same_folder_with_other_settings_is_another_policy(tmp_path, monkeypatch):
    def identity(**options):
        monkeypatch.setattr(serving, "PolicyServer", lambda *_, served, **__: told.append(served))
        with pytest.raises(AttributeError):  # there is no server to run
            serving.serve_folder(str(tmp_path), "openpi", "127.0.0.1", 0, **{"settings": {}, **options})
        return told[-1]

    told = []
    small().save_pretrained(tmp_path)
    assert identity() == identity()
    assert len({identity(), identity(sample=True), identity(settings={"device": "cpu"})}) == 3


def test_connections_do_not_pile_up(served):
    served.server.metadata["batches"] = False
    policy = remote(served.url)

    def begin(*episodes):
        where = {
            "episode_index": torch.tensor(episodes),
            "decision_index": torch.zeros(len(episodes), dtype=torch.int64),
        }
        greedy(policy, observations(len(episodes)).update(where))

    for episode in range(12):
        begin(episode)
    assert len(policy.connections._open) == 4
    begin(20, 21, 22)
    begin(30)  # a stage that is nearly done closes nothing of another
    assert {20, 21, 22, 30} <= policy.connections._open.keys()
    for episode in range(40, 60):
        begin(episode)
    assert len(policy.connections._open) == 12
    for connection in policy.connections._open.values():
        connection.close()
