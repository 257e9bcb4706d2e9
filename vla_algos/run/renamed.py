"""Settings that had another name in version 0.1's first recipes."""

_RENAMED = {
    **dict.fromkeys(("reward_level", "gamma", "lmbda", "normalize", "bootstrap"), "gae"),
    **dict.fromkeys(("log_prob_level", "clip_epsilon", "dual_clip", "entropy_coeff", "entropy_level"), "loss"),
    **dict.fromkeys(("critic_coeff", "clip_value", "huber_delta", "reference_kl_coeff"), "loss"),
    **dict.fromkeys(("aggregation", "epochs", "minibatch_size", "minibatches", "micro_batch_size"), "update"),
    **dict.fromkeys(("target_kl", "critic_warmup_steps", "max_log_ratio"), "update"),
    **dict.fromkeys(("groups", "max_groups", "success_bounds"), "collector"),
}
RENAMED = {  # what was typed, and what is typed now
    **{f"algo.{name}": f"{section}.{name}" for name, section in _RENAMED.items()},
    "algo.group_size": "group_size",
    "algo.patience": "patience",
    **{f"sft.{name}": f"demonstrations.{name}" for name in ("episodes", "stride", "noise", "noise_correlation")},
    "sft.max_steps": "demonstrations.max_steps",
    **{f"sft.{name}": f"cloning.{name}" for name in ("steps", "batch_size", "lr", "weight_decay", "label_sigma")},
    **{f"sft.{name}": f"cloning.{name}" for name in ("state_noise", "warmup_steps")},
    "launcher.warning": "launcher.signal_delay_s",
    "policy.prefix_gigabytes": "policy.prefix_cache_gb",
    "eval=grid": "eval=heldout",
    "mean_of": "eval.mean_of",
    "ablation=swap_instructions": "ablation=swapped_instructions",
}
