"""Decisions per second of a served SmallVLA by number of clients, beside the same batches in this process.

python -m benchmarks.serving [--seconds 4]
"""

import argparse
import asyncio
import threading
import time

import torch
from tensordict import TensorDict

from vla_policies import SmallVLA, SmallVLAConfig, make_example
from vla_policies.remote.connections import Connections
from vla_policies.remote.wire import complete_names, to_message
from vla_policies.serving import PolicyServer

CLIENTS = (1, 4, 16)


def main() -> None:
    """Print a row for each number of clients, all in one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    seconds = parser.parse_args().seconds
    torch.manual_seed(0)
    bounds = {"action_low": (-1.0,) * 4, "action_high": (1.0,) * 4, "state_dim": 4}
    policy = SmallVLA(SmallVLAConfig(**bounds)).eval()
    url = _started(PolicyServer(policy))
    print(f"{'clients':>8}  {'in process':>10}  {'one message':>11}  {'a client each':>13}  decisions/s")
    for number in CLIENTS:
        batch = make_example("metaworld", number)
        batch["images"] = batch["images"][:, :64, :64].contiguous()
        rows = {key: batch[key].numpy() for key in ("images", "states")} | {
            "task_descriptions": list(batch["task_descriptions"])
        }
        names = complete_names("openpi", None)
        whole = to_message(rows, names)
        alone = [to_message({key: value[i] for key, value in rows.items()}, names) for i in range(number)]
        together, apart = Connections(url, "openpi", 60), [Connections(url, "openpi", 60) for _ in range(number)]
        rates = [
            number * _rate(lambda batch=batch: _act(policy, batch), seconds),
            number * _rate(lambda whole=whole, together=together: together.ask({-1: whole}, set()), seconds),
            _rate_of_clients(apart, alone, seconds),
        ]
        print(f"{number:8}  {rates[0]:10.0f}  {rates[1]:11.0f}  {rates[2]:13.0f}")


def _started(server: PolicyServer) -> str:
    port: list[int] = []
    came = threading.Event()

    async def run() -> None:
        ready = asyncio.get_running_loop().create_future()
        ready.add_done_callback(lambda found: (port.append(found.result()), came.set()))
        await server.run("127.0.0.1", 0, ready)

    threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
    came.wait()
    return f"ws://127.0.0.1:{port[0]}"


def _act(policy: SmallVLA, batch: TensorDict) -> None:
    with torch.no_grad():
        policy(batch.clone())


def _rate(act, seconds: float) -> float:
    act()
    began, times = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        act()
        times += 1
    return times / (time.perf_counter() - began)


def _rate_of_clients(connections: list[Connections], messages: list[dict], seconds: float) -> float:
    found = [0.0] * len(connections)

    def client(i: int) -> None:
        found[i] = _rate(lambda: connections[i].ask({0: messages[i]}, set()), seconds)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(len(connections))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(found)


if __name__ == "__main__":
    main()
