"""Keys of RLinf's files that nothing here is made of, and why; read in its code at commit a3816b596.

The first pattern that fits a key counts.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from vla_algos.run.rlinf.keys import Keys

DIFFERS, NONE, NOTHING, SAME, UNKNOWN = "differs", "no counterpart", "does nothing", "the same", "not known"
_FEW = 3  # keys that a pattern stands for and that are printed one by one

_PATTERNS: tuple[tuple[str, str, str], ...] = (
    # ---- where things are
    ("hydra.*", NONE, "where Hydra looks and writes is set here; hydra.run.dir=runs/mine chooses the folder of a run"),
    ("runner.task_type", SAME, "an embodied configuration"),
    ("runner.only_eval", SAME, "False: a training"),
    ("runner.logger.log_path", NONE, "runs go to runs/, or where hydra.run.dir=FOLDER says"),
    (
        "runner.logger.*",
        NONE,
        "metrics.jsonl is always written; logger=[tensorboard,wandb] chooses others",
    ),
    (
        "runner.resume_dir",
        NONE,
        "the same command with hydra.run.dir=FOLDER resumes; checkpoints of RLinf's cannot be resumed",
    ),
    (
        "runner.ckpt_path",
        NONE,
        "weights come from policy.checkpoint; full_weights.pt is converted first (docs/policies.md)",
    ),
    ("runner.eval_policy_path", NONE, "weights come from policy.checkpoint"),
    (
        "runner.weight_sync_interval",
        DIFFERS,
        "the weights that collect are those of the last update, or sync.lag updates older",
    ),
    (
        "runner.overlap_env_bootstrap",
        NONE,
        "PPO's environments are never reset together; for GRPO pipeline.overlap_resets=true begins an "
        "episode while others decide",
    ),
    ("runner.use_training_pipeline", NONE, "nothing is learnt before all of a batch is there"),
    ("runner.max_prompt_length", NOTHING, "read by runs of language models"),
    ("runner.seq_length", NOTHING, "read by runs of language models"),
    ("runner.enable_decoupled_mode", NONE, "who waits for whom is fixed by sync.lag"),
    ("runner.profile*", NONE, "timeline=true notes who did what when"),
    # ---- processes
    ("*.group_name", NONE, "names Ray's workers; there are none"),
    ("cluster.num_nodes", NONE, "torchrun --nnodes or launcher.nodes says it"),
    ("cluster.net_emulation.*", NONE, "no network is emulated"),
    ("cluster.*", NONE, "processes are torchrun's or SLURM's, of equal nodes (docs/placement.md)"),
    (
        "weight_syncer.*",
        NONE,
        "how weights travel is not chosen: nothing is sent where those that learn collect, else what was "
        "trained (docs/placement.md)",
    ),
    (
        "env.*.enable_offload",
        NONE,
        "simulators keep their memory, closing them costs each its start; placement.env or env.gpus puts "
        "them on other GPUs",
    ),
    ("env.enable_offload", NOTHING, "env.train.enable_offload and env.eval.enable_offload are read"),
    (
        "rollout.enable_offload",
        DIFFERS,
        "the policy that collects is gathered for the rollout and freed before the update, always",
    ),
    ("rollout.enable_torch_compile*", NONE, "policies are not compiled"),
    ("rollout.torch_compile*", NONE, "policies are not compiled"),
    ("rollout.enable_cuda_graph", NONE, "no CUDA graphs are recorded"),
    ("rollout.enforce_eager", NOTHING, "read by runs with vLLM or SGLang"),
    ("rollout.gpu_memory_utilization", NOTHING, "read by runs with vLLM or SGLang"),
    ("rollout.backend", NOTHING, "no embodied run reads it"),
    ("rollout.generation_backend", NOTHING, "no embodied run reads it"),
    (
        "rollout.recompute_logprobs",
        NOTHING,
        "no embodied run reads it: log-probabilities are those of the rollout, as here",
    ),
    ("rollout.unnorm_key", NOTHING, "no run reads it"),
    ("rollout.collect_*", NONE, "what the algorithm needs is collected, and nothing else"),
    ("rollout.model.precision", SAME, "the policy that collects is the one that learns, in its precision"),
    ("rollout.model.model_path", SAME, "the policy that collects is the one that learns: policy.checkpoint"),
    ("rollout.model.*", SAME, "the policy that collects is the one that learns"),
    ("rollout.sampling_params.top_p", NOTHING, "sampling passes over it"),
    ("rollout.sampling_params.repetition_penalty", NOTHING, "read by runs with vLLM or SGLang"),
    ("rollout.sampling_params.max_new_tokens", SAME, "an action has as many tokens as it has dimensions"),
    ("actor.training_backend", SAME, "PyTorch's FSDP, here FSDP2"),
    ("actor.fsdp_config.strategy", SAME, "PyTorch's FSDP, here FSDP2"),
    ("actor.fsdp_config.mixed_precision.reduce_dtype", DIFFERS, "gradients are summed in float32, or in policy.dtype"),
    ("actor.fsdp_config.mixed_precision.buffer_dtype", DIFFERS, "buffers stay as the checkpoint has them"),
    (
        "actor.fsdp_config.amp_autocast.*",
        NONE,
        "no autocast: sharding.compute=bf16 or policy.dtype=bfloat16 says what computes in bfloat16",
    ),
    ("actor.fsdp_config.grad_scaler.*", NONE, "bfloat16 needs no scaled gradients, and there is no float16"),
    (
        "actor.fsdp_config.*",
        NONE,
        "memory and speed of RLinf's FSDP alone; ours has the section sharding (docs/several-gpus.md)",
    ),
    # ---- what is learnt
    ("algorithm.kl_beta", NOTHING, "no embodied loss has a KL term; loss.reference_kl_coeff here has"),
    ("algorithm.kl_penalty", NOTHING, "no embodied loss has a KL term"),
    ("algorithm.loss_agg_func", NOTHING, "no embodied loss reads it; update.aggregation is as RLinf's code does it"),
    (
        "algorithm.clip_ratio_c",
        NOTHING,
        "handed to the loss for GR00T alone: there is no dual clipping, loss.dual_clip=null",
    ),
    ("algorithm.normalize_advantages", NOTHING, "advantages of PPO are always normalised, as by gae.normalize=true"),
    ("algorithm.reward_coef", NOTHING, "env.train.reward_coef is read, which does not refer to it in this file"),
    ("algorithm.n_chunk_steps", NOTHING, "env.train.max_steps_per_rollout_epoch and the chunk say it"),
    ("algorithm.rollout_epoch", NOTHING, "env.train.rollout_epoch is read"),
    (
        "algorithm.rollout_store_size_per_rank",
        NONE,
        "batch t is always of the weights that sync.lag says; none is chosen among several",
    ),
    ("algorithm.on_policy_min_ratio", NONE, "batch t is always of the weights that sync.lag says"),
    (
        "actor.seed",
        DIFFERS,
        "the one seed fixes everything that is random; the same number would draw other numbers than RLinf's",
    ),
    (
        "env.train.seed",
        DIFFERS,
        "the one seed fixes everything that is random; the same number would draw other numbers than RLinf's",
    ),
    ("reward.use_reward_model", SAME, "False: rewards are the benchmark's"),
    ("critic.use_critic_model", NOTHING, "no embodied run reads it: the critic is the policy's value head"),
    ("actor.config_name", NOTHING, "actor.model.openpi.config_name is read"),
    ("actor.optim.warmup_style", NOTHING, "actor.optim.lr_scheduler is read"),
    # ---- models
    ("actor.model.model_name", NOTHING, "actor.model.model_type is read"),
    ("actor.model.lora_path", NONE, "there is no adapter to go on with"),
    ("actor.model.lora_rank", NOTHING, "actor.model.is_lora is False"),
    ("actor.model.action_dim", SAME, "the benchmark says how many dimensions an action has"),
    (
        "actor.model.center_crop",
        NOTHING,
        "written into the model's configuration, which nobody reads: no frame is cropped by the model",
    ),
    ("actor.model.image_size", SAME, "the checkpoint says it"),
    (
        "actor.model.max_prompt_length",
        DIFFERS,
        "RLinf pads each prompt to it; here it would be a limit, which longer ones are refused for",
    ),
    ("actor.model.attn_implementation", NONE, "attention is PyTorch's own"),
    ("actor.model.trust_remote_code", NONE, "no code of a checkpoint is ever run"),
    ("actor.model.low_cpu_mem_usage", NONE, "weights are mapped from their files"),
    ("actor.model.vocab_size", SAME, "the checkpoint says it"),
    ("actor.model.hidden_size", SAME, "the checkpoint says it"),
    ("actor.model.add_*bias*", SAME, "the checkpoint says it"),
    ("actor.model.policy_setup", NOTHING, "read for ManiSkill alone"),
    ("actor.model.openpi.dsrl_*", NOTHING, "actor.model.openpi.use_dsrl is not set"),
    ("actor.model.openpi.use_dsrl", SAME, "False"),
    ("actor.model.openpi.use_rlt", SAME, "False"),
    ("actor.model.openpi.rlt_*", NOTHING, "actor.model.openpi.use_rlt is not set"),
    ("actor.model.openpi.rtc_*", NONE, "chunks are executed one after the other, without real-time correction"),
    ("actor.model.openpi.is_nft", SAME, "False"),
    ("actor.model.openpi.noise_params", NOTHING, "actor.model.openpi.noise_anneal is not set"),
    ("actor.model.openpi.noise_logvar_range", NOTHING, "read for flow_noise alone"),
    ("actor.model.openpi.noise_level", NOTHING, "not read for flow_noise"),
    ("actor.model.openpi.value_*", NOTHING, "actor.model.openpi.add_value_head is False, or value_after_vlm is"),
    ("actor.model.openpi.detach_critic_input", NOTHING, "actor.model.openpi.add_value_head is False"),
    ("actor.model.openpi.chunk_critic_input", NOTHING, "actor.model.openpi.add_value_head is False"),
    ("actor.model.openpi.action_env_dim", SAME, "the benchmark says how many dimensions an action has"),
    ("actor.model.openpi.safe_get_logprob", NONE, "log-probabilities are those of the normal distribution"),
    ("actor.model.openpi.double_layer", NONE, "there is one kind of the expert's head"),
    ("actor.model.openpi_data.*", NONE, "statistics are the checkpoint's; policy.norm_stats_id chooses among them"),
    # ---- environments
    ("env.train.video_cfg.*", DIFFERS, "train_videos.environments=1 films training, eval.videos=4 evaluations"),
    ("env.train.is_eval", SAME, "False: training episodes"),
    ("env.train.init_params.num_envs", NOTHING, "overwritten by env.train.total_num_envs"),
    ("env.train.init_params.control_mode", NOTHING, "overwritten by what actor.model.policy_setup says"),
    ("env.train.init_params.obs_mode", SAME, "the benchmark draws what a policy sees"),
    ("env.train.init_params.render_mode", SAME, "the benchmark draws what a policy sees"),
    (
        "env.train.init_params.sim_backend",
        DIFFERS,
        "worlds run in worker processes, one per core; env.backend=cuda has all of them on the GPU",
    ),
    ("env.train.init_params.sim_config.*", SAME, "the task's own: 500 and 5 Hz"),
    ("env.train.init_params.sensor_configs.*", SAME, "env.render_quality=benchmark is the default shader"),
    ("env.train.specific_reset_id", SAME, "null: all initial states"),
    ("env.train.use_full_state", NONE, "states are the benchmark's"),
    ("env.train.wrap_obs_mode", NONE, "observations are the benchmark's"),
    ("env.train.policy_setup", NOTHING, "actor.model.policy_setup is read"),
    (
        "env.train.assets_path",
        NONE,
        "found by itself; env.assets_path=FOLDER or env.path=FOLDER where it is not (docs/environments.md)",
    ),
    ("env.train.task_config.planner_backend", SAME, "motions are timed by mplib"),
    ("env.train.task_config.camera.collect_head_camera", SAME, "the head camera is always drawn"),
    ("env.train.task_config.data_type.*", SAME, "images and joint positions are what there is"),
    ("env.train.task_config.use_seed", NOTHING, "read by RoboTwin's recording of demonstrations"),
    ("env.train.task_config.episode_num", NOTHING, "read by RoboTwin's recording of demonstrations"),
    ("env.train.task_config.save_*", NOTHING, "read by RoboTwin's recording of demonstrations"),
    ("env.train.task_config.collect_data", NOTHING, "read by RoboTwin's recording of demonstrations"),
    ("env.train.task_config.language_num", NOTHING, "read by RoboTwin's recording of demonstrations"),
    ("env.train.task_config.pcd_*", NOTHING, "no points are computed: data_type.pointcloud is False"),
    ("env.train.task_config.render_freq", NOTHING, "for RoboTwin's own viewer"),
    ("env.train.task_config.clear_cache_freq", NONE, "memory of SAPIEN is kept in bounds by itself"),
    ("env.train.task_config.eval_video_log", NOTHING, "read by RoboTwin's own evaluation"),
    ("env.data_collection.*", NONE, "demonstrations are recorded by demonstrations.folder"),
    ("env.delay_sampler.*", NONE, "no delay is added"),
)


def account_for_the_rest(keys: Keys) -> None:
    """Say of each key of the file that nothing was made of, why."""
    remarked = {key for remark in keys.remarks for key in remark.keys}
    of_patterns: dict[tuple[str, str, str], list[str]] = {}
    for key in keys.configuration.values:
        if key in keys.used or key in remarked:
            continue
        found = next((entry for entry in _PATTERNS if fnmatchcase(key, entry[0])), None)
        of_patterns.setdefault(found or ("", UNKNOWN, ""), []).append(key)
    for (pattern, kind, text), found_keys in of_patterns.items():
        if kind == UNKNOWN:
            text = (
                "in none of RLinf's files for these benchmarks and models at commit a3816b596; look whether you need it"
            )
        shown = f"{pattern} ({len(found_keys)} keys)" if pattern.endswith("*") and len(found_keys) > _FEW else ""
        keys.remark(kind, found_keys, text, shown)
