"""Keys of other projects that somebody may write into a recipe: what they are called here, or why they are not here.

The keys are those of verl, TRL, transformers and vLLM, by their last part. Not here: whole commands of verl, which
tools/verl/from_verl.py translates.
"""

from __future__ import annotations

from collections.abc import Collection

_ONE_ENGINE = (
    "a replica prefills and decodes in one engine, with the settings of all replicas, and prefills a group's prompt "
    "once; vLLM's connectors hand requests from one engine to another; use enable_chunked_prefill, "
    "max_num_batched_tokens and max_num_seqs"
)
_FLOAT32_STATE = (
    "optimizer.state_dtype is the type of both moments; master weights are float32, in half the memory with "
    "optimizer.master_remainders"
)
_OF_VERL = "a section of verl's; rlhf-megatron from-verl (tools/verl/from_verl.py) makes a recipe of its command"
# Keys that would do nothing here, or could not: why.
WITHOUT_SENSE = {
    "checkpoint_layer": "choose modules of every layer by recompute.modules (granularity selective), or so many whole "
    "layers by recompute.layers (granularity full)",
    "cudnn_benchmark": "cuDNN would choose between algorithms of convolutions, and only delta nets have one, by "
    "kernels of their own; leave it out",
    "torch_compile": "vLLM compiles the rollout's model unless rollout.enforce_eager; the trainer's layers are "
    "kernels of Megatron's and Transformer Engine's (compiled: docs/results.md#training-speed-of-a-7b-shape); leave it "
    "out",
    # vLLM's keys, and verl's: a section, and what is in it.
    **dict.fromkeys(
        (
            *("disaggregated_prefill", "kv_transfer_config", "kv_role", "disaggregation", "prefill", "decode"),
            *("prefill_replicas", "decode_replicas", "decode_tensor_model_parallel_size", "transfer_backend"),
        ),
        _ONE_ENGINE,
    ),
    **dict.fromkeys(
        ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"), _FLOAT32_STATE
    ),
    **dict.fromkeys(("trainer", "actor_rollout_ref", "custom_reward_function"), _OF_VERL),
}
_NAMES = {
    "name": ("experiment_name", "run_name"),
    "steps": ("max_steps", "total_training_steps"),
    "epochs": ("total_epochs", "num_train_epochs"),
    "run_root": ("output_dir", "default_local_dir"),
    "model.dtype": ("bf16", "fp16", "torch_dtype"),
    "data.validation_files": ("val_files", "eval_files"),
    "batch.prompts_per_step": ("train_batch_size",),
    "batch.minibatch_prompts": ("ppo_mini_batch_size",),
    "batch.responses_per_prompt": ("n", "num_generations"),
    "actor.tokens_per_gpu": (
        *("ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu", "per_device_train_batch_size"),
        "gradient_accumulation_steps",
    ),
    "actor.optimizer.learning_rate": ("lr",),
    "actor.optimizer.clip_grad": ("max_grad_norm", "grad_clip", "gradient_clipping"),
    "actor.optimizer.schedule": ("lr_scheduler_type", "lr_warmup_style"),
    "actor.recompute.granularity": ("gradient_checkpointing", "enable_gradient_checkpointing"),
    "actor.lora.rank": ("lora_rank", "lora_r"),
    "actor.layout.tensor": ("tensor_model_parallel_size", "tensor_parallel_size", "tp_size"),
    "actor.layout.pipeline": ("pipeline_model_parallel_size", "pipeline_parallel_size", "pp_size"),
    "actor.layout.context": ("context_parallel_size", "ulysses_sequence_parallel_size", "cp_size"),
    "actor.layout.expert": ("expert_model_parallel_size", "ep_size"),
    "rollout.max_response_length": ("max_completion_length", "max_new_tokens", "max_tokens"),
    "algorithm.advantage": ("adv_estimator",),
    "algorithm.loss_aggregation": ("loss_agg_mode", "loss_type"),
    "algorithm.policy_loss": ("loss_mode",),
    "algorithm.kl_coef": ("beta", "kl_loss_coef", "init_kl_coef"),
    "algorithm.kl_placement": ("use_kl_loss", "use_kl_in_reward"),
    "algorithm.clip_ratio_high": ("epsilon_high",),
    "checkpoint.save_interval": ("save_freq", "save_steps"),
    "checkpoint.keep_last_k": ("max_actor_ckpt_to_keep", "save_total_limit"),
    "evaluation.interval": ("test_freq", "eval_steps"),
    "monitor.trackers": ("logger", "report_to"),
    "cluster.gpus_per_node": ("n_gpus_per_node",),
    "slurm.nodes": ("nnodes",),
}
NAMES_HERE = {other: key for key, others in _NAMES.items() for other in others}


def name_here(name: str, prefix: str, known: Collection[str]) -> str | None:
    """Return the key of a recipe that a name of another project's means; None: it is no such name.

    ``prefix`` is the path of the section that the name stands in, with its dot; a role's key is then that role's, if
    that is in ``known``.
    """
    key = NAMES_HERE.get(name)
    if key is None:
        return None
    own = f"{prefix.partition('.')[0]}.{key.partition('.')[2]}"
    return own if key.startswith("actor.") and own in known else key
