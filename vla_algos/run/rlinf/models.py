"""The section ``policy`` of what RLinf's ``actor.model`` says."""

from __future__ import annotations

from typing import Any

from vla_algos.run.rlinf.keys import Keys
from vla_algos.run.rlinf.untranslated import DIFFERS, NONE, NOTHING, SAME

MODEL = "actor.model."
_PI = f"{MODEL}openpi."
FAMILIES = {"openvla": "openvla", "openvla_oft": "openvla_oft", "openpi": "pi0"}
_SAMPLING = "rollout.sampling_params."
_PRECISIONS = {None: "float32", "fp32": "float32", "32": "float32", "bf16": "bfloat16", "bf16-mixed": "bfloat16"}


def read_policy(keys: Keys, *, critic: bool) -> None:
    """Set the section ``policy``, and what of ``sharding`` is about precision.

    Args:
        keys: of the file.
        critic: the algorithm has one.
    """
    family = keys.choice(f"{MODEL}model_type", FAMILIES)
    keys.account(f"{MODEL}model_type", "policy")
    keys.settings["policy.family"] = family
    keys.put("policy.checkpoint", lambda: keys.text(f"{MODEL}model_path"))
    lora = keys.where(lambda: keys.flag(f"{MODEL}is_lora", False))
    keys.put(
        "policy.lora_rank", lambda: keys.whole(f"{MODEL}lora_rank", 32) if keys.flag(f"{MODEL}is_lora", False) else None
    )
    if lora:
        if keys.has(f"{MODEL}lora_path"):
            keys.put("policy.lora_adapter", lambda: keys.text(f"{MODEL}lora_path"))
        if family == "pi0":
            text = "RLinf adapts PaliGemma alone; here all linear layers, or those of policy.lora_targets"
            keys.remark(DIFFERS, [f"{MODEL}is_lora"], text)
    elif keys.has(f"{MODEL}lora_path"):
        keys.remark(NOTHING, [f"{MODEL}lora_path"], "actor.model.is_lora is False")
    checkpointing = "actor.fsdp_config.gradient_checkpointing"
    keys.put("policy.gradient_checkpointing", lambda: keys.flag(checkpointing, False))
    head = f"{_PI}add_value_head" if family == "pi0" else f"{MODEL}add_value_head"
    keys.put(
        "policy.value_head", lambda: keys.flag(head, keys.configuration.values.get(f"{MODEL}add_value_head", False))
    )
    if keys.not_given.pop(head, None):
        keys.settings["policy.value_head"] = critic
    keys.account(f"{MODEL}add_value_head", "policy.value_head")
    if critic and keys.settings.get("policy.value_head") is False:
        raise keys.error(f"{MODEL}add_value_head", "algorithm.loss_type has a critic; write True")
    chunk = keys.where(lambda: keys.whole(f"{MODEL}num_action_chunks") > 0)
    if chunk and family == "openvla":
        if keys.whole(f"{MODEL}num_action_chunks") != 1:
            raise keys.error(f"{MODEL}num_action_chunks", "OpenVLA has one action per decision; write 1")
        keys.account(f"{MODEL}num_action_chunks", "policy")
    elif family != "openvla":
        keys.put("policy.num_action_chunks", lambda: keys.whole(f"{MODEL}num_action_chunks"))
    if family == "pi0":
        _read_flow(keys, critic=critic)
    else:
        _read_tokens(keys, family, lora=lora, critic=critic)


def _read_tokens(keys: Keys, family: str, *, lora: bool, critic: bool) -> None:
    _read_precision(keys, lora=lora)
    keys.put("policy.unnorm_key", lambda: keys.text(f"{MODEL}unnorm_key"))

    def temperature() -> float:
        if not keys.flag(f"{_SAMPLING}do_sample", True):
            return 1.0  # RLinf's rollouts sample at 1 then
        return keys.real(f"{_SAMPLING}temperature_train")

    keys.put("policy.temperature", temperature)
    keys.put("policy.top_k", lambda: max(0, keys.whole(f"{_SAMPLING}top_k", -1, least=-1)))  # -1 and 0: all
    if family == "openvla":
        keys.remark(NOTHING, [f"{MODEL}use_proprio"], "its OpenVLA has no such input, nor has ours")
        return
    keys.put(
        "policy.layout",
        lambda: keys.choice(f"{MODEL}implement_version", {each: each for each in ("rlinf", "official")}, "rlinf"),
    )
    keys.put("policy.num_images_in_input", lambda: keys.whole(f"{MODEL}num_images_in_input", 1))
    if keys.settings.get("policy.layout") == "official":
        keys.put("policy.use_proprio", lambda: keys.flag(f"{MODEL}use_proprio", False))
        keys.put("policy.use_film", lambda: keys.flag(f"{MODEL}use_film", False))
        keys.remark(SAME, [f"{MODEL}proprio_dim"], "the benchmark says how many dimensions a state has")
    elif "policy.layout" in keys.settings:
        keys.settings.update({"policy.use_proprio": False, "policy.use_film": False})
        text = "read for implement_version=official alone: policy.use_proprio=false, policy.use_film=false"
        keys.remark(NOTHING, [f"{MODEL}use_proprio", f"{MODEL}use_film", f"{MODEL}proprio_dim"], text)
    if keys.configuration.values.get("env.train.env_type") == "robotwin":
        # ROBOT_PLATFORM=ALOHA; actor.model.center_crop does nothing, and env.train.center_crop has cropped already.
        keys.settings.update(
            {"policy.statistics": "min_max", "policy.center_crop": False, "policy.image_resize": "bicubic"}
        )
        keys.put("policy.max_prompt_length", lambda: keys.whole(f"{MODEL}max_prompt_length"))
    value_type = f"{MODEL}value_type"
    if critic:
        keys.put(
            "policy.value_per_action",
            lambda: keys.choice(value_type, {"action_level": True, "chunk_level": False}, "chunk_level"),
        )
    else:
        keys.remark(NOTHING, [value_type], "actor.model.add_value_head is False")


def _read_precision(keys: Keys, *, lora: bool) -> None:
    """Set what computes in bfloat16, and what is stepped in it."""
    precision, compute = f"{MODEL}precision", "actor.fsdp_config.mixed_precision.param_dtype"

    def weights() -> str:
        found = keys.choice(precision, _PRECISIONS, None)
        return found if lora else "float32"

    def computes() -> str | None:
        names = {keys.choice(precision, _PRECISIONS, None), keys.choice(compute, _PRECISIONS, None)}
        return "bf16" if "bfloat16" in names and keys.settings.get("policy.dtype") == "float32" else None

    keys.put("policy.dtype", weights)
    keys.put("sharding.compute", computes)
    if keys.settings.get("sharding.compute") == "bf16" and not lora:
        text = (
            "RLinf steps weights in bfloat16, which rounds a step of 2e-5 away; here they are float32 and "
            "compute in bfloat16"
        )
        keys.remark(DIFFERS, [precision], text)


def _read_flow(keys: Keys, *, critic: bool) -> None:
    for name in ("use_dsrl", "use_rlt", "is_nft", "rtc_enabled"):
        if keys.configuration.values.get(f"{_PI}{name}"):
            raise keys.error(f"{_PI}{name}", "there is no such policy here; leave it out")
    keys.put("policy.config_name", lambda: keys.text(f"{_PI}config_name"))
    keys.put("policy.num_images_in_input", lambda: keys.whole(f"{_PI}num_images_in_input", 2))
    keys.put("policy.num_steps", lambda: keys.whole(f"{_PI}num_steps", 10))
    if keys.has(f"{_PI}action_horizon"):
        keys.put("policy.action_horizon", lambda: keys.whole(f"{_PI}action_horizon"))
    else:
        keys.settings["policy.action_horizon"] = None
    keys.put("policy.train_expert_only", lambda: keys.flag(f"{_PI}train_expert_only", False))
    keys.put(
        "policy.method",
        lambda: keys.choice(
            f"{_PI}noise_method", {each: each for each in ("flow_sde", "flow_cps", "flow_noise")}, "flow_sde"
        ),
    )
    method = keys.settings.get("policy.method")
    if method in ("flow_sde", "flow_cps"):
        keys.put("policy.noise_level", lambda: keys.real(f"{_PI}noise_level", 0.5))
        anneals = keys.where(lambda: keys.flag(f"{_PI}noise_anneal", False))
        keys.put("policy.noise_anneal", lambda: keys.get(f"{_PI}noise_params", [0.7, 0.3, 400]) if anneals else None)
        keys.account(f"{_PI}noise_anneal", "policy.noise_anneal")
        if not anneals:
            keys.used.pop(f"{_PI}noise_params", None)
    elif method == "flow_noise":
        keys.put("policy.noise_std_range", lambda: keys.get(f"{_PI}noise_logvar_range", [0.08, 0.16]))
    keys.put("policy.joint_log_prob", lambda: keys.flag(f"{_PI}joint_logprob", False))
    keys.put("policy.ignore_last", lambda: keys.flag(f"{_PI}ignore_last", False))
    if f"{_PI}action_chunk" in keys.configuration.values:
        keys.account(f"{_PI}action_chunk", "policy.num_action_chunks")
    _remark_on_unread(keys)
    if critic:
        _read_value_head(keys)


def _read_value_head(keys: Keys) -> None:
    modes = {"mean_token": "mean", "last_token": "last", "first_token": "first"}

    def reads() -> str | None:
        if not keys.flag(f"{_PI}value_after_vlm", False):
            return None
        return keys.choice(f"{_PI}value_vlm_mode", modes, "mean_token")

    keys.put("policy.value_after_vlm", reads)
    keys.put("policy.chunk_critic_input", lambda: keys.flag(f"{_PI}chunk_critic_input", False))
    if keys.settings.get("policy.value_after_vlm") and keys.settings.get("policy.train_expert_only"):
        text = "the value head reads PaliGemma, which is frozen: there is no gradient to detach"
        keys.remark(DIFFERS, [f"{_PI}detach_critic_input"], text)
    else:
        keys.put("policy.detach_critic", lambda: keys.flag(f"{_PI}detach_critic_input", False))


def _remark_on_unread(keys: Keys) -> None:
    """Say of the keys beside the section ``openpi`` whether anything reads them."""
    values: dict[str, Any] = keys.configuration.values
    text = (
        "RLinf holds most weights of pi in bfloat16 whatever it says; here float32, or policy.dtype and "
        "sharding.compute"
    )
    keys.remark(DIFFERS, [f"{MODEL}precision"], text)
    keys.settings.update({"policy.dtype": "float32", "sharding.compute": None})
    compute = "actor.fsdp_config.mixed_precision.param_dtype"
    if values.get(compute) is None:
        keys.account(compute, "sharding.compute")
    else:
        keys.put("sharding.compute", lambda: {"bfloat16": "bf16"}.get(keys.choice(compute, _PRECISIONS)))
    for name in ("num_steps", "noise_level"):
        keys.remark(
            NOTHING, [key for key in [f"{MODEL}{name}"] if key not in keys.used], f"actor.model.openpi.{name} is read"
        )
    keys.remark(NOTHING, [f"{MODEL}use_proprio"], "pi always has the states that its configuration has, here too")
    for name in ("safe_get_logprob", "double_layer"):
        if values.get(f"{_PI}{name}") is False:
            keys.remark(SAME, [f"{_PI}{name}"], "False")
    unread = [f"{MODEL}{name}" for name in ("unnorm_key", "max_prompt_length", "num_images_in_input", "value_type")]
    keys.remark(NOTHING, unread, "not read for pi")
    keys.remark(
        NONE, [key for key in values if key.startswith("rollout.sampling_params.")], "pi has no tokens to sample"
    )
