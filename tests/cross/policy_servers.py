"""The real clients of openpi and vla-eval ask our server, and vla-eval's server answers us: by hand. No test.

With ``openpi-client`` 0.1.2 and ``vla-eval`` 0.8.0 (PyPI) in an environment of their own, THEIRS, and ours, OURS::

    OURS -m recipes serve FOLDER --port 8000
    THEIRS tests/cross/policy_servers.py ask openpi 8000 SHAPE answers.npz   # SHAPE: image size, states, such as 64,39
    OURS tests/cross/policy_servers.py compare FOLDER answers.npz
    OURS -m recipes serve FOLDER --port 8001 --protocol vla-eval
    THEIRS tests/cross/policy_servers.py ask vla_eval 8001 SHAPE answers.npz
    OURS tests/cross/policy_servers.py compare FOLDER answers.npz
    THEIRS tests/cross/policy_servers.py serve 8002 ACTION_DIM
    OURS recipes/evaluate.py policy=server policy.url=ws://127.0.0.1:8002 policy.protocol=vla_eval env=metaworld_button

The server of vla-eval batches, answers in chunks of four, one action at a time, and counts the episodes it was told of.
"""

import sys

import numpy as np

NUMBER, TEXT = 20, "Press a button from the top"


def observations(size, state_dim):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (NUMBER, size, size, 3), dtype=np.uint8)
    return images, generator.random((NUMBER, state_dim), dtype=np.float32)


def ask(protocol, port, shape, file):
    size, state_dim = map(int, shape.split(","))
    images, states = observations(size, state_dim)
    answers = []
    if protocol == "openpi":
        from openpi_client.websocket_client_policy import WebsocketClientPolicy

        client = WebsocketClientPolicy("127.0.0.1", int(port))
        print(client.get_server_metadata())
        for image, state in zip(images, states, strict=True):
            observation = {"observation/image": image, "observation/state": state, "prompt": TEXT}
            answers.append(client.infer(observation)["actions"])
    else:
        import anyio
        from vla_eval.connection import Connection

        async def talk():
            async with Connection(f"ws://127.0.0.1:{port}") as connection:
                print(connection.server_info)
                for image, state in zip(images, states, strict=True):
                    await connection.start_episode({"task": {"name": TEXT}})
                    observation = {"images": {"agentview": image}, "states": state, "task_description": TEXT}
                    answers.append((await connection.act(observation))["actions"][None])
                    await connection.end_episode({"success": False})

        anyio.run(talk)
    np.savez(file, answers=np.stack(answers), shape=[size, state_dim])
    print(f"{len(answers)} answers {answers[0].shape}")


def compare(folder, file):
    import torch
    from tensordict import NonTensorStack, TensorDict
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    from vla_policies import load_policy

    with np.load(file) as found:
        answers, (size, state_dim) = found["answers"], found["shape"]
    images, states = map(torch.from_numpy, observations(size, state_dim))
    policy, largest = load_policy(folder).eval(), 0.0
    for image, state, answer in zip(images, states, answers, strict=True):
        row = TensorDict({"images": image[None], "states": state[None]}, batch_size=[1])
        row["task_descriptions"] = NonTensorStack(TEXT)
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            own = policy(row)["action"][0, : len(answer)].numpy()
        largest = max(largest, np.abs(own - answer).max())
    print(f"{len(answers)} answers, largest difference {largest}")


def serve(port, action_dim):
    from vla_eval.model_servers.predict import PredictModelServer
    from vla_eval.model_servers.serve import serve as run

    class Pushing(PredictModelServer):
        """Acts by what it sees, so that an answer to another observation would be another."""

        episodes = 0

        async def on_episode_start(self, config, ctx):
            self.episodes += 1
            print(f"episode {self.episodes}: {config['task']['name']}", flush=True)
            await super().on_episode_start(config, ctx)

        def predict_batch(self, obs_batch, ctx_batch):
            print(f"batch of {len(obs_batch)}", flush=True)
            seen = [float(next(iter(obs["images"].values())).mean()) / 255 for obs in obs_batch]
            return [{"actions": np.full((4, int(action_dim)), value, np.float32)} for value in seen]

    run(Pushing(chunk_size=4, max_batch_size=16, max_wait_time=0.02), "127.0.0.1", int(port))


if __name__ == "__main__":
    {"ask": ask, "compare": compare, "serve": serve}[sys.argv[1]](*sys.argv[2:])
