"""The section ``policy`` of what RLinf's ``actor.model`` says."""

from vla_from_rlinf.keys import DIFFERS, NONE, NOTHING, SAME, Keys

MODEL = "actor.model."
FAMILIES = {"openvla": "openvla", "openvla_oft": "openvla_oft", "openpi": "pi0"}
_PI = f"{MODEL}openpi."
_SAMPLING = "rollout.sampling_params."
_PRECISIONS = {None: "float32", "fp32": "float32", "32": "float32", "bf16": "bfloat16", "bf16-mixed": "bfloat16"}
_COMPUTE = "actor.fsdp_config.mixed_precision.param_dtype"


def read_policy(keys: Keys, *, critic: bool) -> None:
    """Set the section ``policy``, and what of ``sharding`` is about precision; ``critic``: the algorithm has one."""
    family = keys.choice(f"{MODEL}model_type", FAMILIES)
    keys.account(f"{MODEL}model_type", "policy")
    keys.settings["policy.family"] = family
    keys.put("policy.checkpoint", keys.text, f"{MODEL}model_path")
    lora = _read_lora(keys, family)
    keys.put("policy.gradient_checkpointing", keys.flag, "actor.fsdp_config.gradient_checkpointing", False)
    head = f"{_PI}add_value_head" if family == "pi0" else f"{MODEL}add_value_head"
    keys.put("policy.value_head", keys.flag, head, keys.values.get(f"{MODEL}add_value_head", False))
    keys.account(f"{MODEL}add_value_head", "policy.value_head")
    if critic and keys.settings.get("policy.value_head") is False:
        raise keys.error(f"{MODEL}add_value_head", "algorithm.loss_type has a critic; write True")
    _read_chunk(keys, family)
    if family == "pi0":
        _read_flow(keys, critic=critic)
    else:
        _read_tokens(keys, family, lora=lora, critic=critic)


def _read_lora(keys: Keys, family: str) -> bool:
    lora, path = f"{MODEL}is_lora", f"{MODEL}lora_path"
    has = keys.flag(lora, False)
    keys.put("policy.lora_rank", lambda: keys.whole(f"{MODEL}lora_rank", 32) if keys.flag(lora, False) else None)
    if has and family == "pi0":
        text = "RLinf adapts PaliGemma alone; here all linear layers, or those of policy.lora_targets"
        keys.remark(DIFFERS, [lora], text)
    if keys.has(path) and has:
        keys.put("policy.lora_adapter", keys.text, path)
    elif keys.has(path):
        keys.remark(NOTHING, [path], "actor.model.is_lora is False")
    return has


def _read_chunk(keys: Keys, family: str) -> None:
    chunk = f"{MODEL}num_action_chunks"
    if family != "openvla":
        keys.put("policy.num_action_chunks", keys.whole, chunk)
    elif keys.whole(chunk) != 1:
        raise keys.error(chunk, "OpenVLA has one action per decision; write 1")
    else:
        keys.account(chunk, "policy")


def _read_tokens(keys: Keys, family: str, *, lora: bool, critic: bool) -> None:
    _read_precision(keys, lora=lora)
    keys.put("policy.unnorm_key", keys.text, f"{MODEL}unnorm_key")

    def temperature() -> float:
        sampled = keys.flag(f"{_SAMPLING}do_sample", True)  # else RLinf's rollouts sample at 1
        return keys.real(f"{_SAMPLING}temperature_train") if sampled else 1.0

    keys.put("policy.temperature", temperature)
    keys.put("policy.top_k", lambda: max(0, keys.whole(f"{_SAMPLING}top_k", -1, least=-1)))  # -1 and 0: all
    if family == "openvla":
        keys.remark(NOTHING, [f"{MODEL}use_proprio"], "its OpenVLA has no such input, nor has ours")
        return
    keys.put("policy.layout", keys.choice, f"{MODEL}implement_version", ("rlinf", "official"), "rlinf")
    keys.put("policy.num_images_in_input", keys.whole, f"{MODEL}num_images_in_input", 1)
    if keys.settings.get("policy.layout") == "official":
        keys.put("policy.use_proprio", keys.flag, f"{MODEL}use_proprio", False)
        keys.put("policy.use_film", keys.flag, f"{MODEL}use_film", False)
        keys.remark(SAME, [f"{MODEL}proprio_dim"], "the benchmark says how many dimensions a state has")
    else:
        keys.settings.update({"policy.use_proprio": False, "policy.use_film": False})
        text = "read for implement_version=official alone: policy.use_proprio=false, policy.use_film=false"
        keys.remark(NOTHING, [f"{MODEL}use_proprio", f"{MODEL}use_film", f"{MODEL}proprio_dim"], text)
    if keys.values.get("env.train.env_type") == "robotwin":
        # ROBOT_PLATFORM=ALOHA; actor.model.center_crop does nothing, and env.train.center_crop has cropped already.
        pixels = {"center_crop": False, "image_resize": "bicubic", "statistics": "min_max"}
        keys.settings.update({f"policy.{name}": value for name, value in pixels.items()})
        keys.put("policy.max_prompt_length", keys.whole, f"{MODEL}max_prompt_length")
    value_type, levels = f"{MODEL}value_type", {"action_level": True, "chunk_level": False}
    if critic:
        keys.put("policy.value_per_action", keys.choice, value_type, levels, "chunk_level")
    else:
        keys.remark(NOTHING, [value_type], "actor.model.add_value_head is False")


def _read_precision(keys: Keys, *, lora: bool) -> None:
    """Set what computes in bfloat16, and what is stepped in it."""
    precision = f"{MODEL}precision"

    def weights() -> str:
        found = keys.choice(precision, _PRECISIONS, None)
        return found if lora else "float32"

    def computes() -> str | None:
        names = {keys.choice(precision, _PRECISIONS, None), keys.choice(_COMPUTE, _PRECISIONS, None)}
        return "bf16" if "bfloat16" in names and keys.settings.get("policy.dtype") == "float32" else None

    keys.put("policy.dtype", weights)
    keys.put("sharding.compute", computes)
    if keys.settings.get("sharding.compute") == "bf16" and not lora:
        text = "RLinf steps weights in bfloat16, which rounds a step of 2e-5 away"
        keys.remark(DIFFERS, [precision], f"{text}; here they are float32 and compute in it")


def _read_flow(keys: Keys, *, critic: bool) -> None:
    for name in ("use_dsrl", "use_rlt", "is_nft", "rtc_enabled"):
        if keys.values.get(f"{_PI}{name}"):
            raise keys.error(f"{_PI}{name}", "there is no such policy here; leave it out")
    keys.put("policy.config_name", keys.text, f"{_PI}config_name")
    keys.put("policy.num_images_in_input", keys.whole, f"{_PI}num_images_in_input", 2)
    keys.put("policy.num_steps", keys.whole, f"{_PI}num_steps", 10)
    if keys.has(f"{_PI}action_horizon"):
        keys.put("policy.action_horizon", keys.whole, f"{_PI}action_horizon")
    else:
        keys.settings["policy.action_horizon"] = None
    keys.put("policy.train_expert_only", keys.flag, f"{_PI}train_expert_only", False)
    _read_noise(keys)
    keys.put("policy.joint_log_prob", keys.flag, f"{_PI}joint_logprob", False)
    if keys.flag(f"{_PI}ignore_last", False) and keys.settings.get("policy.method") != "flow_cps":  # never draws it
        raise keys.error(f"{_PI}ignore_last", "any step may be the stochastic one; leave it out")
    keys.remark(SAME, [f"{_PI}ignore_last"], "False, or flow_cps, which never draws the last step")
    if f"{_PI}action_chunk" in keys.values:
        keys.account(f"{_PI}action_chunk", "policy.num_action_chunks")
    _remark_on_unread(keys)
    if critic:
        _read_value_head(keys)


def _read_noise(keys: Keys) -> None:
    kinds = ("flow_sde", "flow_cps", "flow_noise")
    keys.put("policy.method", keys.choice, f"{_PI}noise_method", kinds, "flow_sde")
    method = keys.settings.get("policy.method")
    if method in ("flow_sde", "flow_cps"):
        keys.put("policy.noise_level", keys.real, f"{_PI}noise_level", 0.5)
        if keys.flag(f"{_PI}noise_anneal", False):
            raise keys.error(f"{_PI}noise_anneal", "there is no annealing here; leave it out")
        keys.remark(SAME, [f"{_PI}noise_anneal"], "False")
    elif method == "flow_noise":
        keys.put("policy.noise_std_range", keys.get, f"{_PI}noise_logvar_range", [0.08, 0.16])


def _read_value_head(keys: Keys) -> None:
    def reads() -> str | None:
        after = keys.flag(f"{_PI}value_after_vlm", False)
        return keys.choice(f"{_PI}value_vlm_mode", {"mean_token": "mean"}, "mean_token") if after else None

    keys.put("policy.value_after_vlm", reads)
    if keys.flag(f"{_PI}chunk_critic_input", False):
        raise keys.error(f"{_PI}chunk_critic_input", "the value head reads all actions; leave it out")
    keys.remark(SAME, [f"{_PI}chunk_critic_input"], "False: the value head reads all actions")
    if keys.settings.get("policy.value_after_vlm") and keys.settings.get("policy.train_expert_only"):
        text = "the value head reads PaliGemma, which is frozen: there is no gradient to detach"
        keys.remark(DIFFERS, [f"{_PI}detach_critic_input"], text)
    else:
        keys.put("policy.detach_critic", keys.flag, f"{_PI}detach_critic_input", False)


def _remark_on_unread(keys: Keys) -> None:
    """Say of the keys beside the section ``openpi`` whether anything reads them."""
    text = "RLinf holds most weights of pi in bfloat16 in any case; here float32, or policy.dtype and sharding.compute"
    keys.remark(DIFFERS, [f"{MODEL}precision"], text)
    keys.settings.update({"policy.dtype": "float32", "sharding.compute": None})
    if keys.has(_COMPUTE):
        keys.put("sharding.compute", lambda: {"bfloat16": "bf16"}.get(keys.choice(_COMPUTE, _PRECISIONS)))
    else:
        keys.account(_COMPUTE, "sharding.compute")
    for name in ("num_steps", "noise_level"):
        if f"{MODEL}{name}" not in keys.used:
            keys.remark(NOTHING, [f"{MODEL}{name}"], f"actor.model.openpi.{name} is read")
    keys.remark(NOTHING, [f"{MODEL}use_proprio"], "pi always has the states that its configuration has, here too")
    for name in ("safe_get_logprob", "double_layer"):
        if keys.values.get(f"{_PI}{name}") is False:
            keys.remark(SAME, [f"{_PI}{name}"], "False")
    unread = [f"{MODEL}{name}" for name in ("unnorm_key", "max_prompt_length", "num_images_in_input", "value_type")]
    keys.remark(NOTHING, unread, "not read for pi")
    keys.remark(NONE, [key for key in keys.values if key.startswith(_SAMPLING)], "pi has no tokens to sample")
