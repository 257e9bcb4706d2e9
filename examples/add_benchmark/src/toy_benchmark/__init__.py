"""A point whose instruction names one of two coloured discs: all that a benchmark of one's own needs."""

from vla_common.settings import Count
from vla_envs import Benchmark, BenchmarkSchema, SimulatorSpec, Task

COLOURS = ("red", "blue")
SUITES = {"discs": COLOURS, **{colour: (colour,) for colour in COLOURS}}  # name of a suite -> its tasks


def suites() -> list[str]:
    """List what may stand after ``toy/``."""
    return list(SUITES)


def make_spec(
    suite: str, *, image_size: Count = 32, max_episode_steps: Count = 40, shaped_reward: bool = False
) -> SimulatorSpec:
    """Describe a suite without building a world.

    Args:
        suite: one of :func:`suites`.
        image_size: pixels of a side.
        max_episode_steps: horizon in primitive actions.
        shaped_reward: pay coming closer to the disc, at most 1 in sum, beside 1 for each action that ends on it.

    Raises:
        ValueError: there is no such suite.
    """
    if suite not in SUITES:
        raise ValueError(f"unknown suite {suite!r} of toy; known are {', '.join(SUITES)}")
    return SimulatorSpec(
        id=f"toy/{suite}",
        entry_point="toy_benchmark.simulator:ToySimulator",  # imported where it runs: in worker processes
        tasks=tuple(Task(name=f"go-{colour}", instruction=f"go to the {colour} disc") for colour in SUITES[suite]),
        trials=20,  # initial states per task in the benchmark's own evaluation
        image_shape=(image_size, image_size),
        state_dim=len(BENCHMARK.schema.states),
        action_low=(-1.0, -1.0),
        action_high=(1.0, 1.0),
        neutral_action=(0.0, 0.0),  # moves nothing: evaluate.py ablation=do_nothing
        max_episode_steps=max_episode_steps,
        control_frequency=10,
        protocol_deviations=("training reward for coming closer",) if shaped_reward else (),
        options={"shaped_reward": shaped_reward},  # for the simulator, as spec.options
    )


BENCHMARK = Benchmark(
    name="toy",
    title="Toy",  # in Gymnasium ids: vla/Toy-discs-v0
    schema=BenchmarkSchema(
        image_size=(32, 32),
        states=("x (-1 to 1)", "y (-1 to 1)"),
        actions=("dx (tenths)", "dy (tenths)"),
        instruction="go to the red disc",
    ),
    make_spec=make_spec,
    suites=suites,
)
