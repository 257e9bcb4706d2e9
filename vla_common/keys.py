"""The data contract: every TensorDict key that environments, policies and algorithms share.

Environments and policies never import each other; this module is what both may read. Shapes use
``N`` environments, ``C`` primitive actions per chunk (one *decision*), ``A`` action dimensions,
``S`` state dimensions, ``V`` wrist cameras and ``H x W`` pixels.
"""

NEXT = "next"

# Observation, written by the environment.
IMAGES = "images"  # uint8 [N, H, W, 3], third-person camera, upright, RGB
WRIST_IMAGES = "wrist_images"  # uint8 [N, V, H, W, 3], only where the benchmark has wrist cameras
STATES = "states"  # float32 [N, S], proprioception
TASK_DESCRIPTIONS = "task_descriptions"  # text [N], the instruction alone; uint8 [N, 288] after InstructionsToBytes

# Identity of the running episode, written by the environment.
TASK_ID = "task_id"  # int64 [N]
TRIAL_ID = "trial_id"  # int64 [N]
GROUP_ID = "group_id"  # int64 [N], equal for episodes that are compared with each other

# Where a decision stands, written by ``vla_algos.evaluate`` for whatever changes what the policy sees.
EPISODE_INDEX = "episode_index"  # int64 [N], place among the evaluated episodes; -1 for an idle slot
DECISION_INDEX = "decision_index"  # int64 [N], how many decisions of the episode came before

# Decision, written by the policy.
ACTION = "action"  # float32 [N, C, A], in the simulator's own units and gripper sign
ACTION_TOKENS = "action_tokens"  # int64 [N, C, A]
DENOISE_CHAIN = "denoise_chain"  # float32 [N, 2 or K + 1, H, A_model], flow policies: before and after stochastic steps
DENOISE_STEP = "denoise_step"  # int64 [N], flow policies: which step was stochastic
DENOISED = "denoised"  # float32 [N, C, A], flow policies: what was sampled; [N, C, A, K] if all K steps are stochastic
ACTION_LOG_PROB = "action_log_prob"  # float32 [N, C, A]
FEATURES = "features"  # float16 [N, F], steered policies: what the frozen one makes of an observation
STEERING = "steering"  # float32 [N, U], steered policies: what the actor draws, noise or a change of the actions
MODEL_IMAGES = "model_images"  # uint8 [N, n, h, w, 3], the policy's cameras, no larger than it sees them
PROMPT_TOKENS = "prompt_tokens"  # int64 [N, L], so that the update never tokenises again
STATE_VALUE = "state_value"  # float32 [N, 1] or [N, C], policies with a value head

# Outcome, written by the environment under ``NEXT``.
REWARD = "reward"  # float32 [N, 1], sum over the executed actions of the chunk
STEP_REWARDS = "step_rewards"  # float32 [N, C]
STEP_MASK = "step_mask"  # bool [N, C], primitive actions that were really executed
TERMINATED = "terminated"  # bool [N, 1]
TRUNCATED = "truncated"  # bool [N, 1]
DONE = "done"  # bool [N, 1]
SUCCESS = "success"  # bool [N, 1], success so far in this episode
SUCCESS_AT_END = "success_at_end"  # bool [N, 1], success after the last executed action
EPISODE_RETURN = "episode_return"  # float32 [N, 1]
EPISODE_LEN = "episode_len"  # int64 [N, 1], in primitive actions
SUBTASKS = "subtasks"  # int64 [N, 1], tasks of the episode's chain that are solved so far; only where there are chains
CRASHED = "crashed"  # bool [N, 1], the simulator died: this episode has no result
ACTIONS_CLIPPED = "actions_clipped"  # float32 [N, 1], share of the executed action elements that the simulator clipped

# With observation, ``action`` and ``episode_len`` in recorded demonstrations, one row per recorded frame.
EPISODE = "episode"  # int64 [K], which demonstration; its rows are consecutive and in order
STEP = "step"  # int64 [K], primitive actions executed before the frame
EXECUTED = "executed_actions"  # float32 [L, A], all actions of a demonstration, with their noise
FINAL_STATES = "final_states"  # float32 [K, S], the states in which the demonstration ends

# Written by the learner, one row per decision. Per decision [N, 1], or per primitive action [N, C].
ADVANTAGE = "advantage"  # float32 [N, 1] or [N, C]
VALUE_TARGET = "value_target"  # float32, the shape of the advantage
WEIGHT = "weight"  # float32 [N, 1], how much a decision counts in the loss; absent means 1
REFERENCE_LOG_PROB = "reference_log_prob"  # float32 [N, C, A], of the same actions under a frozen policy
PROXIMAL_LOG_PROB = "proximal_log_prob"  # float32 [N, C, A], of the same actions at the start of an update

# Written by a policy for an update, if it keeps what a frozen part made of each decision.
PREFIX_KEYS = ("prefix", "keys")  # [N, layers, heads, P, head_dim]
PREFIX_VALUES = ("prefix", "values")  # the same shape
PREFIX_VALID = ("prefix", "valid")  # bool [N, P]
PREFIX_POOLED = ("prefix", "pooled")  # [N, width], what the value head reads of it

MAX_INSTRUCTION = 288  # bytes of a task description, where there is a bound; RoboTwin's longest has 267
