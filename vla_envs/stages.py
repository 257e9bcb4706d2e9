"""Stages: groups of slots of one environment that take turns, so that simulators work while a policy decides."""

TOGETHER = (
    "{id} simulates all worlds together, so that no part of them can be stepped while others wait: type stages=1 "
    "(pipeline.stages=1 in a recipe), or env.backend=processes"
)


def check_stages(stages: int, num_envs: int, num_workers: int, batched: str = "") -> None:
    """Refuse stages that environments cannot be divided into; ``batched`` is the id if worlds share one simulation."""
    if stages < 1:
        raise ValueError(f"stages is {stages}, must be at least 1 (pipeline.stages in a recipe)")
    if stages == 1:
        return
    if batched:
        raise ValueError(TOGETHER.format(id=batched))
    if num_envs % stages:
        raise ValueError(
            f"stages={stages}: num_envs={num_envs} cannot be divided into as many groups of the same size; take a "
            f"multiple, such as num_envs={stages * -(-num_envs // stages)}"
        )
    if num_envs < stages * num_workers:
        raise ValueError(
            f"stages={stages}: {num_workers} workers share num_envs={num_envs}, so that some would have nothing to do "
            f"in a stage; take num_workers={num_envs // stages} or fewer, or num_envs={stages * num_workers} or more"
        )


def divide(num_envs: int, num_workers: int, stages: int) -> list[list[int]]:
    """List the slots of each stage such that every worker ``w``, whose slots are ``s % num_workers == w``, has some."""
    by_worker = [slot for worker in range(num_workers) for slot in range(worker, num_envs, num_workers)]
    return [sorted(by_worker[stage::stages]) for stage in range(stages)]
