"""A policy behind a websocket, for robots and other people's benchmarks, in openpi's protocol or vla-eval's.

Observations of several clients that wait at the same time are computed together. One that holds several, as
``policy=server`` sends those of all its environments, is computed by itself: as large a batch as in the client's
process, and the same bits.
"""

import asyncio
import contextlib
import hashlib
import json
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Le
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State

from vla_common.checksums import identity
from vla_common.keys import ACTION, IMAGES, STATES, TASK_DESCRIPTIONS, WRIST_IMAGES
from vla_common.program import one_line
from vla_common.settings import Count, NonNegative, checked
from vla_policies.checkpoint.hub import resolve
from vla_policies.policy import VLAPolicy
from vla_policies.registry import find_policy_class, load_policy
from vla_policies.remote.wire import LARGEST, Names, ProtocolName, complete_names, from_message, pack, unpack

Port = Annotated[int, Ge(0), Le(65_535)]
_CLIENTS = 256  # connections at a time; each may hold a message of LARGEST bytes
_LONGEST = 2000  # characters of an instruction
_MOST = 4096  # observations of a message, and pixels of a side
_PATIENCE = 60.0  # seconds in which a client has to take its answer


@dataclass
class _Request:
    client: ServerConnection
    rows: dict[str, Any]  # [n, ...] by our keys
    answer: asyncio.Future[np.ndarray]  # [n, C, A]
    came: float = field(default_factory=time.monotonic)
    alone: bool = False  # it failed with others

    @property
    def number(self) -> int:
        return len(self.rows[TASK_DESCRIPTIONS])

    @property
    def shapes(self) -> tuple[Any, ...]:
        return tuple(value.shape[1:] for value in self.rows.values() if isinstance(value, np.ndarray))


class PolicyServer:
    """Serves a policy until it is stopped.

    Args:
        policy: is asked by one thread alone.
        protocol: ``openpi`` or ``vla_eval``.
        names: of observations where the clients have others than :data:`~vla_policies.remote.wire.NAMES`.
        sample: sample actions; else greedy ones.
        max_batch: observations of several clients that are computed together at most; a message's own always are.
        max_wait: seconds that the first of them waits for others.
        served: what it is, for a client to tell it from another.
    """

    @checked
    def __init__(
        self,
        policy: VLAPolicy,
        protocol: ProtocolName = "openpi",
        names: Names | None = None,
        *,
        sample: bool = False,
        max_batch: Count = 16,
        max_wait: NonNegative = 0.005,
        served: str | None = None,
    ):
        self.policy, self.protocol = policy.eval(), protocol
        self.exploration = ExplorationType.RANDOM if sample else ExplorationType.DETERMINISTIC
        self.max_batch, self.max_wait = max_batch, max_wait
        every = complete_names(protocol, names)
        self.names = {key: name for key, name in every.items() if key in policy.in_keys or key == TASK_DESCRIPTIONS}
        if (wrists := getattr(policy, "num_images", 1) - 1) > (named := len(self.names.get(WRIST_IMAGES, ()))):
            raise ValueError(
                f"names has {named} wrist cameras, the policy looks at {wrists}; type --names wrist_images=A,B"
            )
        self.metadata = {"policy": policy.family, "batches": protocol == "openpi", "identity": served}
        self.counts: Counter[str] = Counter()
        self._latencies: deque[float] = deque(maxlen=1000)  # seconds, of the last answers
        self._queue: asyncio.Queue[_Request] = asyncio.Queue()
        self._waiting: set[asyncio.Future[np.ndarray]] = set()
        self._thread = ThreadPoolExecutor(1, "policy")

    async def run(self, host: str, port: int, ready: asyncio.Future[int] | None = None) -> None:
        """Listen until cancelled; ``ready`` gets the port, which may have been 0 for a free one."""
        options: dict[str, Any] = {"max_size": LARGEST, "max_queue": 1, "compression": None}
        options["origins"] = [None]  # no page in a browser of this machine
        async with serve(self._converse, host, port, process_request=self._page, **options) as self._server:
            assert isinstance(self._server, Server)
            if ready is not None:
                ready.set_result(next(iter(self._server.sockets)).getsockname()[1])
            try:
                await self._work()
            finally:  # or their clients would be waited for
                for answer in self._waiting:
                    answer.cancel()

    # ---- clients

    async def _converse(self, client: ServerConnection) -> None:
        self.counts["connections"] += 1
        chunk: deque[tuple[list[str], np.ndarray]] = deque()  # of vla-eval's episode: what is left, and for which text
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            if self.protocol == "openpi":
                await client.send(pack(self.metadata))
            async for message in client:
                try:
                    answer = await self._answer(client, message, chunk)
                except (ValueError, RuntimeError) as error:  # what the client sent, or the policy says of it
                    self.counts["errors"] += 1
                    answer = one_line(str(error))
                    if self.protocol != "openpi":
                        said = {"type": "error", "payload": {"error": answer}, "seq": 0, "timestamp": time.time()}
                        answer = pack(said, text_keys=True)
                if answer is not None:
                    async with asyncio.timeout(_PATIENCE):
                        await client.send(answer)

    async def _answer(
        self, client: ServerConnection, message: str | bytes, chunk: deque[tuple[list[str], np.ndarray]]
    ) -> str | bytes | None:
        content = unpack(message)
        if self.protocol == "openpi":
            rows, alone = self._rows(content)
            began = time.monotonic()
            actions = await self._actions(client, rows)
            timing = {"infer_ms": 1000 * (time.monotonic() - began)}
            return pack({"actions": actions[0] if alone else actions, "server_timing": timing})
        kind, number = (content.get("type"), content.get("seq")) if isinstance(content, dict) else (None, None)
        payload: dict[str, Any]
        if kind == "hello":
            wants = {"send_wrist_image": WRIST_IMAGES in self.names, "send_state": STATES in self.names}
            payload = {"harness_version": "vla-torchrl", "protocol_version": 1, "model_server": self.policy.family}
            payload |= {"capabilities": {}, "observation_params": wants, "identity": self.metadata["identity"]}
        elif kind == "observation":
            rows, _ = self._rows(content.get("payload"))
            text = rows[TASK_DESCRIPTIONS]
            if not chunk or chunk[0][0] != text:  # a chain's next task cuts the chunk of the last
                chunk.clear()
                chunk.extend((text, action) for action in (await self._actions(client, rows))[0])
            kind, payload = "action", {"actions": chunk.popleft()[1]}
        elif kind in ("episode_start", "episode_end"):
            chunk.clear()
            return None
        else:
            raise ValueError(f"a message of the type {kind!r} is not understood; is this a client of vla-eval?")
        return pack({"type": kind, "payload": payload, "seq": number, "timestamp": time.time()}, text_keys=True)

    def _rows(self, content: Any) -> tuple[dict[str, Any], bool]:
        """Return the observations ``[n, ...]`` of a message, and whether it has just one, without ``n``."""
        found = from_message(content, self.names)
        texts = found[TASK_DESCRIPTIONS]
        alone = isinstance(texts, str)
        found[TASK_DESCRIPTIONS] = texts = [texts] if alone else texts
        right = isinstance(texts, list) and all(isinstance(text, str) and len(text) <= _LONGEST for text in texts)
        if not right or not 0 < len(texts) <= _MOST:
            wanted = f"a text of at most {_LONGEST} characters, or a list of at most {_MOST} of them"
            raise ValueError(f"{self.names[TASK_DESCRIPTIONS][0]!r} must be {wanted}")
        for key, dimensions in {IMAGES: 3, WRIST_IMAGES: 4, STATES: 1}.items():
            if (value := found.get(key)) is None:
                continue
            value = value[None] if alone and isinstance(value, np.ndarray) else value
            last = self.policy.state_dim if key == STATES else 3
            right = isinstance(value, np.ndarray) and value.ndim == dimensions + 1 and 0 not in value.shape
            right = right and (value.dtype.kind in "fiu" if key == STATES else value.dtype == np.uint8)
            if right and key == STATES:
                right = bool((np.abs(value, dtype=float) < 1e38).all())  # float32 has them; nan is not
            if not right or len(value) != len(texts) or value.shape[-1] != last or max(value.shape[1:]) > _MOST:
                wanted = (
                    f"{last} finite numbers" if key == STATES else f"uint8 [height, width, 3], at most {_MOST} a side,"
                )
                raise ValueError(f"{', '.join(self.names[key])!r} must be {wanted} for each of {len(texts)} texts")
            found[key] = value.astype(np.float32 if key == STATES else np.uint8, copy=False)
        return found, alone

    # ---- the policy

    async def _actions(self, client: ServerConnection, rows: dict[str, Any]) -> np.ndarray:
        request = _Request(client, rows, asyncio.get_running_loop().create_future())
        self._waiting.add(request.answer)
        self._queue.put_nowait(request)
        try:
            actions = await request.answer
        finally:
            self._waiting.discard(request.answer)
        self._latencies.append(time.monotonic() - request.came)
        return actions

    async def _work(self) -> None:
        loop, left = asyncio.get_running_loop(), list[_Request]()
        while True:
            batch = [left.pop() if left else await self._queue.get()]
            await self._gather(batch, left)
            for request in batch:
                if request.client.state is not State.OPEN and not request.answer.done():
                    request.answer.set_exception(RuntimeError("the client is gone"))
            if not (batch := [request for request in batch if not request.answer.done()]):
                continue
            arrays = batch[0].rows.keys() - {TASK_DESCRIPTIONS}
            rows: dict[str, Any] = {key: np.concatenate([each.rows[key] for each in batch]) for key in arrays}
            rows[TASK_DESCRIPTIONS] = [text for each in batch for text in each.rows[TASK_DESCRIPTIONS]]
            try:
                actions = await loop.run_in_executor(self._thread, self._compute, rows)
            except Exception as error:  # whatever a policy raises of what strangers send
                if len(batch) > 1:
                    left += [replace(request, alone=True) for request in batch]  # which of them is it?
                elif not batch[0].answer.done():
                    batch[0].answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
                continue
            self.counts.update(decisions=len(actions), batches=1)
            ends = np.cumsum([request.number for request in batch])
            for request, own in zip(batch, np.split(actions, ends[:-1]), strict=True):
                if not request.answer.done():  # its client is gone
                    request.answer.set_result(own)

    async def _gather(self, batch: list[_Request], left: list[_Request]) -> None:
        """Add to the first request those that come within ``max_wait`` and fit; one that does not is ``left``."""
        deadline = batch[0].came + self.max_wait
        while batch[0].number == 1 and not batch[0].alone and len(batch) < self.max_batch:
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    request = await self._queue.get()
            except TimeoutError:
                return
            if request.number > 1 or request.shapes != batch[0].shapes:
                left.append(request)
                return
            batch.append(request)

    def _compute(self, rows: Mapping[str, Any]) -> np.ndarray:
        texts = rows[TASK_DESCRIPTIONS]
        arrays = {key: torch.from_numpy(value) for key, value in rows.items() if key != TASK_DESCRIPTIONS}
        observations = TensorDict(arrays, [len(texts)])
        observations.set(TASK_DESCRIPTIONS, NonTensorStack(*map(NonTensorData, texts)))
        with torch.no_grad(), set_exploration_type(self.exploration):
            return self.policy(observations.to(self.policy.device))[ACTION].cpu().numpy()

    # ---- pages

    def _page(self, client: ServerConnection, request: Request) -> Response | None:
        """Answer what a browser or a monitor asks; ``None`` for a websocket, of which there are not too many."""
        waits = np.percentile([*self._latencies] or [0.0], [50, 95])
        now = {"clients": len(self._server.connections), "queue": self._queue.qsize()}
        now |= {"latency_p50_ms": round(1000 * waits[0], 2), "latency_p95_ms": round(1000 * waits[1], 2)}
        if request.path in ("/health", "/healthz"):
            about = {**self.metadata, "protocol": self.protocol, "chunk_size": self.policy.chunk_size}
            return client.respond(HTTPStatus.OK, json.dumps({"status": "ok", **about, **now}) + "\n")
        if request.path == "/metrics":  # as Prometheus reads it
            lines = (f"vla_policy_{name} {value}" for name, value in {**self.counts, **now}.items())
            return client.respond(HTTPStatus.OK, "\n".join(lines) + "\n")
        if max(len(self._server.connections), len(self._waiting)) >= _CLIENTS:
            return client.respond(HTTPStatus.SERVICE_UNAVAILABLE, f"{_CLIENTS} clients are here already\n")
        return None


@checked
def serve_folder(
    folder: str, protocol: ProtocolName, host: str, port: Port, settings: Mapping[str, Any], **options: Any
) -> None:
    """Load the policy of a folder and serve it until Ctrl-C; ``options`` are of :class:`PolicyServer`.

    OSError: the port is taken, or there is no such folder. ValueError: a policy that cannot be loaded so.
    """
    path = resolve(folder)
    policy = load_policy(path, **{"device": find_policy_class(path).default_device(), **settings})
    said = f"{identity(path) or path} {sorted(settings.items())} {options.get('sample', False)}"
    server = PolicyServer(policy, protocol, served=hashlib.sha256(said.encode()).hexdigest(), **options)

    async def run() -> None:
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        running = asyncio.ensure_future(server.run(host, port, ready))
        either: list[asyncio.Future[Any]] = [running, ready]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            place, shown = f"{host}:{ready.result()}", {key: ", ".join(names) for key, names in server.names.items()}
            print(f"{policy.family} at ws://{place} ({protocol}); Ctrl-C ends it")
            print(f"observations are {json.dumps(shown)}; actions [{policy.chunk_size}, {policy.action_dim}]")
            print(f"health and numbers: http://{place}/health, /metrics", flush=True)
        await running

    asyncio.run(run())
