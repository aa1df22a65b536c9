"""Settings with which TRL and verl do the work of one of our recipes; pure functions, without either package."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_megatron.errors import UserError
from rlhf_megatron.recipe import RLRecipe

# Of TRL, by shape: its share of the GPU for weights and cache together, about what ours gives its engine, and whether
# the engine's memory is given back while the model learns: where the rest would not fit beside it.
ENGINE_MEMORY = {"0.5B": (0.35, False), "7B": (0.42, True), "0.5B-80GB": (0.45, False), "7B-80GB": (0.4, True)}
# Of a micro-batch of TRL's: our choice, not its limit, since it computes logprobs in chunks; ours may be larger.
TRL_TOKENS_AT_ONCE = 16384


def trl_is_missing() -> str:
    """Return the reason why TRL cannot run here, with what to do; nothing where it can."""
    return "" if importlib.util.find_spec("trl") else 'TRL is not installed: pip install -e ".[peer]"'


def trl_settings(recipe: RLRecipe, model: str, overrides: Sequence[str], on_gpu: bool) -> dict[str, Any]:
    """Return settings for ``peer_trl.py`` with which TRL does the work of the recipe. ``overrides``: KEY=JSON."""
    rollout, optimizer, batch = recipe.rollout, recipe.actor.optimizer, recipe.batch
    rows = batch.prompts_per_step * batch.responses_per_prompt
    prompt, response = recipe.data.max_prompt_length, rollout.max_response_length
    at_once = rows_at_once(rows, prompt + response, min(recipe.actor.update_tokens, TRL_TOKENS_AT_ONCE))
    arguments: dict[str, Any] = {
        "output_dir": "trl",
        "seed": recipe.seed,
        "max_steps": recipe.steps,
        # One optimizer step for each batch of responses: steps_per_generation is gradient_accumulation_steps.
        "per_device_train_batch_size": at_once,
        "num_generations": batch.responses_per_prompt,
        "num_iterations": 1,
        "shuffle_dataset": False,
        "max_completion_length": response,
        "mask_truncated_completions": False,
        "generation_kwargs": {"ignore_eos": True},
        "temperature": rollout.temperature,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": prompt + response,
        "beta": 0.0,
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "scale_rewards": "group" if recipe.algorithm.divides_by_std else "none",
        "epsilon": recipe.algorithm.clip_ratio_low,
        "epsilon_high": recipe.algorithm.clip_ratio_high,
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": optimizer.schedule,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.epsilon,
        "max_grad_norm": optimizer.clip_grad,
        "gradient_checkpointing": recipe.actor.recompute.granularity != "none",
        "bf16": recipe.model.dtype == "bfloat16",
        "model_init_kwargs": {"dtype": recipe.model.dtype},
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    # What TRL has no names for, where vLLM would choose another type than ours or most of the host's memory.
    engine = {} if on_gpu else {"dtype": recipe.model.dtype, "enforce_eager": True, "kv_cache_memory_bytes": 2**26}
    if on_gpu and model in ENGINE_MEMORY:
        arguments["vllm_gpu_memory_utilization"], arguments["vllm_enable_sleep_mode"] = ENGINE_MEMORY[model]
    for override in overrides:
        key, _, value = override.partition("=")
        try:
            arguments[key] = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f"{override}: must be KEY=JSON, such as optim='\"adamw_torch\"'") from error
    arguments.setdefault("gradient_accumulation_steps", rows // arguments["per_device_train_batch_size"])
    return {
        "model": "model", "prompts": "prompts.parquet", "prompt_length": prompt,
        "arguments": arguments, "engine": engine,
    }  # fmt: skip


def rows_at_once(rows: int, length: int, tokens: int) -> int:
    """Return the most rows of ``length`` tokens that fit a micro-batch of ``tokens`` and divide ``rows``; 1 at
    least."""
    return max(count for count in range(1, rows + 1) if rows % count == 0 and (count == 1 or count * length <= tokens))


# verl 0.9.1 patches a class of TRL's wherever TRL is installed, and ends where it cannot be imported.
VERL_IMPORTS = """
import verl
from verl.utils.import_utils import is_trl_available
if is_trl_available():
    try:
        from trl.experimental.ppo import AutoModelForCausalLMWithValueHead
    except ImportError:
        from trl import AutoModelForCausalLMWithValueHead
"""

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

# On one GPU: packed rows, one AdamW step, mean over tokens, no reference model, no entropy; what verl's performance
# tuning guide advises (docs/perf/perf_tuning.rst of verl 0.9.1).
VERL: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": False,
    "actor_rollout_ref.hybrid_engine": True,
    "actor_rollout_ref.model.use_remove_padding": True,
    f"{_ACTOR}.use_dynamic_bsz": True,
    f"{_ACTOR}.use_kl_loss": False,
    f"{_ACTOR}.entropy_coeff": 0,
    f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ACTOR}.ppo_epochs": 1,
    f"{_ROLLOUT}.name": "vllm",
    f"{_ROLLOUT}.tensor_model_parallel_size": 1,
    f"{_ROLLOUT}.ignore_eos": True,
    f"{_ROLLOUT}.enforce_eager": False,
    f"{_ROLLOUT}.enable_chunked_prefill": True,
    f"{_ROLLOUT}.enable_prefix_caching": True,
    f"{_ROLLOUT}.max_num_batched_tokens": 16384,
    f"{_ROLLOUT}.load_format": "dummy",  # the trainer sends the weights before the first step
    f"{_ROLLOUT}.calculate_log_probs": False,  # but where it bypasses a pass of its own; they cost the rollout time
    f"{_ROLLOUT}.agent.default_agent_loop": "lengths_of_data",
    "trainer.v1.sampler.custom_sampler.path": "pkg://peer_verl_loop",
    "trainer.v1.sampler.custom_sampler.name": "EagerReplayBuffer",
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.resume_mode": "disable",
    "trainer.logger": ["file"],
    "trainer.total_epochs": 1000,
    "trainer.project_name": "peer",
    "data.dataloader_num_workers": 0,
    "data.shuffle": False,
    "reward.custom_reward_function.name": "compute_score",
    "reward.num_workers": 2,
    "ray_kwargs.ray_init.num_cpus": 64,  # in name only: its actors ask for more than a small machine has, and wait
    "+ray_kwargs.ray_init.include_dashboard": False,
}
_FSDP2 = {
    "model_engine": "dp",
    f"{_ACTOR}.strategy": "fsdp2",
    f"{_ACTOR}.fsdp_config.strategy": "fsdp2",
    f"{_ACTOR}.fsdp_config.model_dtype": "fp32",  # master weights, as ours; it computes in bfloat16
    "actor_rollout_ref.model.use_fused_kernels": True,  # logprobs without all of the logits
    "actor_rollout_ref.model.fused_kernel_options.impl_backend": "triton",
    "actor_rollout_ref.model.use_liger": True,
}
_OFFLOADED = {
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    f"{_ACTOR}.fsdp_config.param_offload": True,
    f"{_ACTOR}.fsdp_config.optimizer_offload": True,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{_ROLLOUT}.max_num_seqs": 256,
    f"{_ROLLOUT}.agent.num_workers": 4,  # each with a gigabyte of the host's memory, which offloading takes
}
# By shape and engine. 0.5B: nothing is offloaded, nothing recomputed, and the engine keeps its memory, which takes less
# time than to sleep. 7B with float32 masters: 122 GB in the update.
# In 80 GB all of it is bfloat16, Adam's moments too: not what ours computes, an upper bound of verl's speed.
_SMALL = {
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    f"{_ACTOR}.fsdp_config.reshard_after_forward": False,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": 32768,
    f"{_ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{_ROLLOUT}.free_cache_engine": False,
    f"{_ROLLOUT}.max_num_seqs": 512,
}
_MEGATRON_OPTIMIZER = f"+{_ACTOR}.optim.override_optimizer_config"
_MEGATRON_MODEL = f"++{_ACTOR}.megatron.override_transformer_config"
# Megatron-core as ours, by mbridge; Adam on the host by Megatron's own means.
_MEGATRON = {
    f"{_ACTOR}.megatron.use_mbridge": True,
    f"{_ACTOR}.megatron.vanilla_mbridge": True,
    f"{_ACTOR}.megatron.tensor_model_parallel_size": 1,
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": 1,
    f"{_ACTOR}.megatron.param_offload": True,
    f"{_ACTOR}.megatron.optimizer_offload": True,
    f"{_MEGATRON_OPTIMIZER}.optimizer_cpu_offload": True,
    f"{_MEGATRON_OPTIMIZER}.optimizer_offload_fraction": 1.0,
    f"{_MEGATRON_OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d": True,
    f"{_MEGATRON_OPTIMIZER}.use_precision_aware_optimizer": True,
    f"{_MEGATRON_MODEL}.recompute_granularity": "full",
    f"{_MEGATRON_MODEL}.recompute_method": "uniform",
    f"{_MEGATRON_MODEL}.recompute_num_layers": 1,
    f"{_MEGATRON_MODEL}.attention_backend": "fused",  # the default is the package flash-attn; this is cuDNN's
    "actor_rollout_ref.model.use_liger": False,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{_ROLLOUT}.gpu_memory_utilization": 0.7,
    f"{_ROLLOUT}.max_num_seqs": 256,
}
VERL_SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "fsdp2": {
        "0.5B": _FSDP2 | _SMALL,
        "0.5B-80GB": _FSDP2 | _SMALL,
        "7B": _FSDP2 | _OFFLOADED | {f"{_ROLLOUT}.gpu_memory_utilization": 0.6},
        "7B-80GB": _FSDP2
        | _OFFLOADED
        | {f"{_ROLLOUT}.gpu_memory_utilization": 0.7, f"{_ACTOR}.fsdp_config.model_dtype": "bf16"},
    },
    "megatron": {"7B": _MEGATRON, "7B-80GB": _MEGATRON},
}


def verl_settings(
    recipe: RLRecipe, model: str, engine: str, overrides: Sequence[str], folder: str, reward: str
) -> dict[str, Any]:
    """Return settings for ``peer_verl.py`` with which verl does the work of the recipe, whose inputs lie in ``folder``.

    ``engine``: of ``VERL_SHAPES``. ``overrides``: hydra's, KEY=VALUE.
    """
    rollout, batch, optimizer = recipe.rollout, recipe.batch, recipe.actor.optimizer
    values = {
        **VERL,
        **VERL_SHAPES[engine][model],
        "data.train_files": f"{folder}/verl.parquet",
        "data.val_files": f"{folder}/verl.parquet",
        "data.train_batch_size": batch.prompts_per_step,
        "data.max_prompt_length": recipe.data.max_prompt_length,
        "data.max_response_length": rollout.max_response_length,
        "actor_rollout_ref.model.path": f"{folder}/model",
        f"{_ACTOR}.ppo_mini_batch_size": batch.prompts_per_step,  # counted in prompts: one optimizer step
        f"{_ACTOR}.clip_ratio_low": recipe.algorithm.clip_ratio_low,
        f"{_ACTOR}.clip_ratio_high": recipe.algorithm.clip_ratio_high,
        f"{_ACTOR}.optim.lr": optimizer.learning_rate,
        f"{_ACTOR}.optim.weight_decay": optimizer.weight_decay,
        f"{_ROLLOUT}.n": batch.responses_per_prompt,
        f"{_ROLLOUT}.temperature": rollout.temperature,
        f"{_ROLLOUT}.max_model_len": recipe.data.max_prompt_length + rollout.max_response_length,
        f"{_ROLLOUT}.agent.agent_loop_config_path": f"{folder}/agent_loop.yaml",
        "algorithm.norm_adv_by_std_in_grpo": recipe.algorithm.divides_by_std,
        "reward.custom_reward_function.path": reward,
        "trainer.total_training_steps": recipe.steps,
        "trainer.experiment_name": model,
        "trainer.default_local_dir": f"{folder}/verl",
    }
    return {
        "config": "ppo_megatron_trainer" if engine == "megatron" else "ppo_trainer",
        "overrides": [*(f"{key}={written(value)}" for key, value in values.items()), *overrides],
        "prompts": "prompts.parquet",
        "lengths": response_lengths(recipe),
    }


def written(value: Any) -> str:
    """Return a value in hydra's grammar."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else str(value)


def response_lengths(recipe: RLRecipe) -> list[list[int]]:
    """Return tokens of each response to each prompt of a step, the same in every step."""
    drawn, batch = recipe.rollout.drawn_lengths, recipe.batch
    assert drawn is not None
    rows = range(batch.prompts_per_step * batch.responses_per_prompt)
    lengths = [min(drawn.of_row(row), recipe.rollout.max_response_length) for row in rows]
    return [lengths[first : first + batch.responses_per_prompt] for first in rows[:: batch.responses_per_prompt]]


def tokens_per_step(recipe: RLRecipe) -> int:
    """Return those of all prompts, counted once for each response, and responses."""
    rows = recipe.batch.prompts_per_step * recipe.batch.responses_per_prompt
    return rows * recipe.data.max_prompt_length + sum(map(sum, response_lengths(recipe)))


def without_folders(values: Mapping[str, Any], folder: str, here: str) -> dict[str, Any]:
    """Return settings fit to be published: nothing in them says where the benchmark ran."""
    text = json.dumps(values).replace(f"{folder}/", "").replace(f"{here}/", "")
    published: dict[str, Any] = json.loads(text)
    return published
