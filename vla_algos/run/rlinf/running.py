"""Optimizer, processes and how long: what RLinf's ``actor.optim``, ``runner``, ``cluster`` and ``env.eval`` say."""

from __future__ import annotations

from functools import partial
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from vla_algos.run.loggers import LOGGERS
from vla_algos.run.rlinf.keys import Keys
from vla_algos.run.rlinf.untranslated import DIFFERS, NONE, NOTHING
from vla_algos.run.rlinf.worlds import read_other_suite

_OPTIM = "actor.optim."
_TRAIN = "env.train."


def read_run(keys: Keys) -> None:
    """Set how long a run is, and how often it evaluates and saves."""

    def iterations() -> int:
        epochs, most = keys.whole("runner.max_epochs"), keys.whole("runner.max_steps", -1, least=-1)
        return epochs if most < 0 else min(epochs, most)

    keys.put("iterations", iterations)
    keys.put("evaluate_every", lambda: max(0, keys.whole("runner.val_check_interval", -1, least=-1)))
    if keys.where(lambda: keys.whole("runner.save_interval", -1, least=-1) > 0):
        keys.put("checkpoint_every", lambda: keys.whole("runner.save_interval"))
    else:
        keys.remark(
            DIFFERS, ["runner.save_interval"], "RLinf saves at the end alone; here every checkpoint_every iterations"
        )
    ordered = f"{_TRAIN}use_ordered_reset_state_ids"
    keys.put("episode_order", lambda: "ordered" if keys.flag(ordered, False) else "random")
    keys.put("pipeline.stages", lambda: keys.whole("rollout.pipeline_stage_num", 1))
    _read_evaluation(keys)


def _read_evaluation(keys: Keys) -> None:
    values, every = keys.configuration.values, keys.settings.get("evaluate_every")
    of_evaluation = [key for key in values if key.startswith("env.eval.")]
    video, temperature = "env.eval.video_cfg.save_video", "rollout.sampling_params.temperature_eval"
    shown = f"env.eval.* ({len(of_evaluation)} keys)"
    if not every:
        text = "runner.val_check_interval is not above 0: RLinf never evaluates in this run; ours does before and after"
        keys.remark(NOTHING, of_evaluation, text, shown)
        keys.remark(NOTHING, [temperature], text)
        return
    if values.get(video) is False:
        keys.put("eval.videos", lambda: 0 if keys.flag(video) is False else None)
    if values.get(temperature) is not None and values.get("actor.model.model_type") != "openpi":
        keys.put("eval.sampled", lambda: keys.number(temperature) > 0)
        trained = keys.settings.get("policy.temperature")
        other = keys.settings["eval.sampled"] and values[temperature] != trained
        keys.put("eval.temperature", lambda: keys.real(temperature) if other else None)
    keys.settings["eval.mean_of"] = []
    read_other_suite(keys)
    text = (
        "which episodes an evaluation has is said by eval=benchmark (each initial state of the protocol "
        "once) or eval.trials"
    )
    rest = [key for key in of_evaluation if key not in keys.used]
    keys.remark(DIFFERS, rest, text, shown)


def read_optim(keys: Keys) -> None:
    """Set the section ``optim``."""
    for ours, theirs, default in (
        ("lr", "lr", ...),
        ("eps", "adam_eps", 1e-8),
        ("weight_decay", "weight_decay", 0.01),
        ("max_grad_norm", "clip_grad", ...),
    ):
        keys.put(f"optim.{ours}", partial(keys.real, f"{_OPTIM}{theirs}", default))
    keys.remark(
        DIFFERS, [f"{_OPTIM}clip_grad"], "gradients of policy and value head are clipped apart; RLinf's together"
    )
    keys.put(
        "optim.betas", lambda: [keys.number(f"{_OPTIM}adam_beta1", 0.9), keys.number(f"{_OPTIM}adam_beta2", 0.999)]
    )
    keys.put(
        "optim.schedule",
        lambda: keys.choice(f"{_OPTIM}lr_scheduler", {"constant": "constant", "cosine": "cosine"}, "constant"),
    )
    warmup, total = f"{_OPTIM}lr_warmup_steps", f"{_OPTIM}total_training_steps"

    def warmup_updates() -> int:
        number = keys.whole(warmup, -1, least=-1)
        if number >= 0:
            return number
        return int(keys.number(f"{_OPTIM}lr_warmup_steps_ratio", 0.0) * keys.number(total, 0))

    keys.put("optim.warmup_updates", warmup_updates)
    if keys.settings.get("optim.schedule") != "cosine":
        unread = [
            total,
            *(f"{_OPTIM}{name}" for name in ("num_cycles", "min_lr", "min_lr_rate", "lr_warmup_steps_ratio")),
        ]
        keys.remark(NOTHING, unread, "actor.optim.lr_scheduler is constant")
        return

    def final() -> float:
        if keys.has(f"{_OPTIM}min_lr_rate"):
            return keys.real(f"{_OPTIM}min_lr_rate")
        return round(keys.number(f"{_OPTIM}min_lr", 0.0) / keys.number(f"{_OPTIM}lr"), 12)

    keys.put("optim.final_lr", final)
    if keys.has(f"{_OPTIM}min_lr_rate"):
        keys.remark(NOTHING, [f"{_OPTIM}min_lr"], "actor.optim.min_lr_rate is set")
    cycles = f"{_OPTIM}num_cycles"
    if keys.configuration.values.get(cycles, 0.5) == 0.5:
        keys.account(cycles, "optim.schedule")
    else:
        keys.remark(NONE, [cycles], "the cosine falls once, which is 0.5")
    if keys.configuration.values.get(total) == keys.settings.get("iterations"):
        keys.account(total, "iterations")
    else:
        keys.remark(NONE, [total], "the cosine falls until the last of the iterations")


def read_loggers(keys: Keys) -> list[str]:
    """Return what is typed for the loggers of a file, with project and name; nothing for TensorBoard alone."""
    begin = "runner.logger."
    backends = keys.configuration.values.get(f"{begin}logger_backends")
    if not isinstance(backends, list) or not backends or not all(name in LOGGERS for name in backends):
        return []
    keys.account(f"{begin}logger_backends", "logger")
    typed = [] if backends == ["tensorboard"] else [f"logger=[{','.join(backends)}]"]
    for theirs, ours in (("project_name", "project"), ("experiment_name", "name")):
        if not keys.has(f"{begin}{theirs}"):
            continue
        for name in (name for name in backends if ours in LOGGERS[name]):
            text = QuotedString(text=keys.text(f"{begin}{theirs}"), quote=Quote.single).with_quotes()
            typed.append(f"logger.{name}.{ours}={text}")
            keys.account(f"{begin}{theirs}", f"logger.{name}.{ours}")
    return typed


def read_processes(keys: Keys) -> dict[str, Any]:
    """Set how weights are divided and what leaves the GPU; returns the section ``placement``, where roles differ."""
    strategy = "actor.fsdp_config.sharding_strategy"
    shards = {"full_shard": "all", "shard_grad_op": "all", "no_shard": 1}
    if keys.configuration.values.get(strategy) == "hybrid_shard":
        keys.remark(NONE, [strategy], "sharding.shards=N says how many processes share one copy")
    else:
        keys.put("sharding.shards", lambda: keys.choice(strategy, shards, "full_shard"))
    reshard = "actor.fsdp_config.reshard_after_forward"
    if keys.configuration.values.get(strategy) == "shard_grad_op":
        keys.settings["sharding.reshard_after_forward"] = False
    else:
        keys.put("sharding.reshard_after_forward", lambda: keys.flag(reshard, True))
    keys.put("sharding.cpu_offload", lambda: keys.flag("actor.fsdp_config.cpu_offload", False))
    if keys.settings.get("sharding.cpu_offload"):
        keys.remark(DIFFERS, ["actor.enable_offload"], "sharding.cpu_offload=true has all of it in host memory already")
    else:
        keys.put("offload.optimizer", lambda: keys.flag("actor.enable_offload", False))
    return _read_placement(keys)


def _read_placement(keys: Keys) -> dict[str, Any]:
    begin = "cluster.component_placement."
    found: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    for key, value in keys.configuration.values.items():
        if not key.startswith(begin):
            continue
        for role in (each.strip() for each in key.removeprefix(begin).split(",")):
            if role in ("actor", "rollout", "env") and isinstance(value, (str, int)) and not isinstance(value, bool):
                found[role] = str(value).replace(" ", "")
                names.setdefault(role, []).append(key)
    mentioned = [key for each in names.values() for key in each]
    if set(found) != {"actor", "rollout", "env"} or any(
        not set(each) <= set("0123456789-,al") for each in found.values()
    ):
        return {}
    if len(set(found.values())) == 1:
        for key in mentioned:
            keys.account(key, "placement")
        return {}
    for role, each in names.items():
        for key in each:
            keys.account(key, f"placement.{role}")
    return found
