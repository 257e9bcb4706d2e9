"""Connections to a policy server: each wait has an end, and a server that comes back is asked again."""

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from vla_policies.remote.wire import LARGEST, pack, unpack

_PAUSE = 0.5  # seconds between attempts
_STAGES = 4  # batches of other episodes between two decisions of one


class ServerError(ConnectionError):
    """A policy server is not there, does not answer in time, or says that something is wrong."""


class Connections:
    """One connection per episode, since servers keep what belongs to one, and remember which.

    ``timeout`` is what a decision may take, seconds, with all attempts to reach a server that is gone. After a break
    the same observation is sent again: openpi's servers keep nothing, of vla-eval's the episode begins once more.
    """

    def __init__(self, url: str, protocol: str, timeout: float):
        self.url, self.protocol, self.timeout = url, protocol, timeout
        self.metadata: dict[str, Any] = {}
        self._open: OrderedDict[int, ClientConnection] = OrderedDict()
        self._number = 0  # of vla-eval's messages
        self._most = 0  # observations of a question: near the end of an evaluation there are fewer

    def ask(self, observations: Mapping[int, dict[str, Any]], begins: set[int]) -> dict[int, np.ndarray]:
        """Return the actions ``[C, A]`` for the observation of each episode; of a batch, of the whole batch.

        ``begins`` are episodes that have no decision yet. A ``ServerError`` after ``timeout`` seconds.
        """
        deadline, gone, answers = time.monotonic() + self.timeout, 0.0, dict[int, np.ndarray]()
        for episode in begins:
            self._close(episode)
        while waiting := [episode for episode in observations if episode not in answers]:
            try:
                numbers = {each: self._send(each, observations[each], deadline) for each in waiting}
                for episode in waiting:  # all were sent before: a server that batches has them together
                    answers[episode] = self._receive(episode, numbers[episode], deadline)
            except (OSError, WebSocketException) as error:
                if isinstance(error, ServerError):
                    raise
                if getattr(getattr(error, "rcvd", None), "code", 0) == 1009:  # too big
                    raise ServerError(f"{self.url} takes no message so large; type a smaller env.num_envs") from error
                for episode in waiting:
                    self._close(episode)
                gone = gone or time.monotonic()
                if time.monotonic() + _PAUSE > deadline:
                    what = "answer" if isinstance(error, TimeoutError) else "policy server"
                    raise ServerError(
                        f"no {what} at {self.url} within policy.timeout={self.timeout:g} seconds "
                        f"({error or 'silent'}); start it, then type the same again: what was evaluated is kept"
                    ) from error
                time.sleep(_PAUSE)
        if gone:
            print(f"warning: the policy server at {self.url} was gone for {time.monotonic() - gone:.1f} s")
        for episode in observations:
            self._open.move_to_end(episode)
        self._most = max(self._most, len(observations))
        while len(self._open) > _STAGES * self._most:
            self._close(next(iter(self._open)))
        return answers

    def _close(self, episode: int) -> None:
        if (connection := self._open.pop(episode, None)) is not None:
            connection.close()

    def _send(self, episode: int, observation: dict[str, Any], deadline: float) -> int:
        if episode not in self._open:
            left = max(0.1, deadline - time.monotonic())
            options: dict[str, Any] = {"open_timeout": left, "max_size": LARGEST, "compression": None}
            options["ping_interval"] = None  # openpi's server answers none while it computes
            self._open[episode] = connect(self.url, close_timeout=1, **options).__enter__()  # _close leaves it
            self._greet(episode, observation, deadline)
        if self.protocol == "openpi":
            self._open[episode].send(pack(observation))
            return 0
        return self._say(episode, "observation", observation)

    def _greet(self, episode: int, observation: dict[str, Any], deadline: float) -> None:
        if self.protocol == "vla_eval":
            self._say(episode, "hello", {"harness_version": "vla-torchrl", "protocol_version": 1})
        before, greeting = self.metadata.get("identity"), self._read(episode, deadline)
        if self.protocol == "vla_eval":
            if greeting.get("type") != "hello" or not isinstance(greeting.get("payload"), dict):
                raise ServerError(f"the server at {self.url} does not speak vla_eval; set policy.protocol")
            greeting = greeting["payload"]
        self.metadata = greeting
        if before not in (None, greeting.get("identity")):
            raise ServerError(f"the server at {self.url} came back with another policy; start the one that it had")
        if self.protocol == "vla_eval":
            self._say(episode, "episode_start", {"task": {"name": observation.get("task_description", "")}})

    def _say(self, episode: int, kind: str, payload: Any) -> int:
        self._number += 1
        message = {"type": kind, "payload": payload, "seq": self._number, "timestamp": time.time()}
        self._open[episode].send(pack(message, text_keys=True))
        return self._number

    def _receive(self, episode: int, number: int, deadline: float) -> np.ndarray:
        answer = self._read(episode, deadline)
        while self.protocol == "vla_eval":
            kind, payload = answer.get("type"), answer.get("payload")
            if kind == "error":
                raise ServerError(f"the policy server at {self.url} says: {str(payload)[:300]}")
            if kind == "action" and answer.get("seq") == number:
                answer = payload if isinstance(payload, dict) else {}
                break
            answer = self._read(episode, deadline)  # of an observation before
        actions = answer.get("actions")
        if not isinstance(actions, np.ndarray) or actions.dtype.kind != "f" or not np.isfinite(actions).all():
            raise ServerError(f"the policy server at {self.url} has sent no actions that are numbers")
        return np.atleast_2d(actions).astype(np.float32)

    def _read(self, episode: int, deadline: float) -> dict[str, Any]:
        message = self._open[episode].recv(timeout=max(0.0, deadline - time.monotonic()))
        if isinstance(message, str):  # openpi's way to send an error
            raise ServerError(f"the policy server at {self.url} says: {message.strip()[-300:]}")
        try:
            content = unpack(message)
        except ValueError as error:
            raise ServerError(f"what the server at {self.url} has sent is not understood: {error}") from error
        if not isinstance(content, dict):
            raise ServerError(f"the server at {self.url} does not speak {self.protocol}; set policy.protocol")
        return content
