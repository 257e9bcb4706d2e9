"""Optimizer, processes and how long: what RLinf's ``actor.optim``, ``runner``, ``cluster`` and ``env.eval`` say."""

from hydra.core.override_parser.types import Quote, QuotedString

from vla_from_rlinf.env import TRAIN
from vla_from_rlinf.keys import DIFFERS, NONE, NOTHING, SAME, Keys

_OPTIM, _LOGGER, _FSDP = "actor.optim.", "runner.logger.", "actor.fsdp_config."
_LOGGERS = ("tensorboard", "wandb", "swanlab")


def read_run(keys: Keys) -> None:
    """Set how long a run is, and how often it evaluates and saves."""

    def iterations() -> int:
        epochs, most = keys.whole("runner.max_epochs"), keys.whole("runner.max_steps", -1, least=-1)
        return epochs if most < 0 else min(epochs, most)

    every, saves = "runner.val_check_interval", "runner.save_interval"
    keys.put("iterations", iterations)
    keys.put("evaluate_every", lambda: max(0, keys.whole(every, -1, least=-1)))
    if keys.whole(saves, -1, least=-1) > 0:
        keys.put("checkpoint_every", keys.whole, saves)
    else:
        keys.remark(DIFFERS, [saves], "RLinf saves at the end alone; here every checkpoint_every iterations")
    ordered = f"{TRAIN}use_ordered_reset_state_ids"
    keys.put("episode_order", lambda: "ordered" if keys.flag(ordered, False) else "random")
    keys.put("pipeline.stages", keys.whole, "rollout.pipeline_stage_num", 1)
    _read_evaluation(keys)


def _read_evaluation(keys: Keys) -> None:
    values = keys.values
    of_evaluation = [key for key in values if key.startswith("env.eval.")]
    video, temperature = "env.eval.video_cfg.save_video", "rollout.sampling_params.temperature_eval"
    shown = f"env.eval.* ({len(of_evaluation)} keys)"
    if not keys.settings.get("evaluate_every"):
        text = "runner.val_check_interval is not above 0: RLinf never evaluates in this run; ours does before and after"
        keys.remark(NOTHING, of_evaluation, text, shown)
        keys.remark(NOTHING, [temperature], text)
        return
    if values.get(video) is False:
        keys.put("eval.videos", lambda: int(keys.flag(video)))
    if keys.has(temperature) and values.get("actor.model.model_type") != "openpi":
        keys.put("eval.sampled", lambda: keys.number(temperature) > 0)
        other = keys.settings["eval.sampled"] and values[temperature] != keys.settings.get("policy.temperature")
        keys.put("eval.temperature", lambda: keys.real(temperature) if other else None)
    keys.settings["eval.mean_of"] = []
    text = "an evaluation has each initial state once, or those of eval.trials; another suite is eval.env.id"
    keys.remark(DIFFERS, [key for key in of_evaluation if key not in keys.used], text, shown)


def read_optim(keys: Keys) -> None:
    """Set the section ``optim``."""
    names = {"lr": ("lr", ...), "eps": ("adam_eps", 1e-8), "weight_decay": ("weight_decay", 0.01)}
    for ours, (theirs, default) in {**names, "max_grad_norm": ("clip_grad", ...)}.items():
        keys.put(f"optim.{ours}", keys.real, f"{_OPTIM}{theirs}", default)
    text = "gradients of policy and value head are clipped apart; RLinf's together"
    keys.remark(DIFFERS, [f"{_OPTIM}clip_grad"], text)
    betas = (f"{_OPTIM}adam_beta1", 0.9), (f"{_OPTIM}adam_beta2", 0.999)
    keys.put("optim.betas", lambda: [keys.number(*beta) for beta in betas])
    keys.put("optim.schedule", keys.choice, f"{_OPTIM}lr_scheduler", ("constant", "cosine"), "constant")
    warmup, ratio = f"{_OPTIM}lr_warmup_steps", f"{_OPTIM}lr_warmup_steps_ratio"
    total = f"{_OPTIM}total_training_steps"

    def warmup_updates() -> int:
        number = keys.whole(warmup, -1, least=-1)
        return number if number >= 0 else int(keys.number(ratio, 0.0) * keys.number(total, 0))

    keys.put("optim.warmup_updates", warmup_updates)
    cosine = [f"{_OPTIM}{name}" for name in ("num_cycles", "min_lr", "min_lr_rate")]
    if keys.settings.get("optim.schedule") == "cosine":
        _read_cosine(keys, total, *cosine)
    else:
        keys.remark(NOTHING, [total, ratio, *cosine], "actor.optim.lr_scheduler is constant")


def _read_cosine(keys: Keys, total: str, cycles: str, least: str, rate: str) -> None:
    if keys.has(rate):
        keys.put("optim.final_lr", keys.real, rate)
        keys.remark(NOTHING, [least], "actor.optim.min_lr_rate is set")
    else:
        keys.put("optim.final_lr", lambda: round(keys.number(least, 0.0) / keys.number(f"{_OPTIM}lr"), 12))
    if keys.values.get(cycles, 0.5) == 0.5:
        keys.account(cycles, "optim.schedule")
    else:
        keys.remark(NONE, [cycles], "the cosine falls once, which is 0.5")
    if keys.values.get(total) == keys.settings.get("iterations"):
        keys.account(total, "iterations")
    else:
        keys.remark(NONE, [total], "the cosine falls until the last of the iterations")


def read_loggers(keys: Keys) -> list[str]:
    """Return what is typed for the loggers of a file, with project and name; nothing for TensorBoard alone."""
    backends = keys.values.get(f"{_LOGGER}logger_backends")
    if not isinstance(backends, list) or not backends or not all(name in _LOGGERS for name in backends):
        return []
    keys.account(f"{_LOGGER}logger_backends", "logger")
    typed = [] if backends == ["tensorboard"] else [f"logger=[{','.join(backends)}]"]
    for theirs, ours in (("project_name", "project"), ("experiment_name", "name")):
        for name in backends if keys.has(f"{_LOGGER}{theirs}") else []:
            if name != "tensorboard":
                text = QuotedString(text=keys.text(f"{_LOGGER}{theirs}"), quote=Quote.single).with_quotes()
                typed.append(f"logger.{name}.{ours}={text}")
                keys.account(f"{_LOGGER}{theirs}", f"logger.{name}.{ours}")
    return typed


def read_processes(keys: Keys) -> None:
    """Set how weights are divided and what leaves the GPU."""
    strategy, found = f"{_FSDP}sharding_strategy", keys.values.get(f"{_FSDP}sharding_strategy")
    shards = {"full_shard": "all", "shard_grad_op": "all", "no_shard": 1}
    if found == "hybrid_shard":
        keys.remark(NONE, [strategy], "sharding.shards=N says how many processes share one copy")
    else:
        keys.put("sharding.shards", keys.choice, strategy, shards, "full_shard")
    if found == "shard_grad_op":
        keys.settings["sharding.reshard_after_forward"] = False
    else:
        keys.put("sharding.reshard_after_forward", keys.flag, f"{_FSDP}reshard_after_forward", True)
    keys.put("sharding.cpu_offload", keys.flag, f"{_FSDP}cpu_offload", False)
    if keys.settings.get("sharding.cpu_offload"):
        text = "sharding.cpu_offload=true has all of it in host memory already"
        keys.remark(DIFFERS, ["actor.enable_offload"], text)
    else:
        keys.put("offload.optimizer", keys.flag, "actor.enable_offload", False)
    _read_placement(keys)


def _read_placement(keys: Keys) -> None:
    begin = "cluster.component_placement."
    placed = [key for key in keys.values if key.startswith(begin)]
    where: dict[str, str] = {}
    for key in placed:
        where.update({role.strip(): str(keys.values[key]) for role in key.removeprefix(begin).split(",")})
    if len({where.get(role) for role in ("actor", "rollout", "env")}) == 1:
        text = "each process collects and learns, as here: torchrun --nproc-per-node 8 or launcher=slurm_8gpus"
        keys.remark(SAME, placed, text)
    else:
        keys.remark(NONE, placed, "processes that only collect, or only learn, are not translated: docs/placement.md")
