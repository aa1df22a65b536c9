"""tools/verl: commands of verl, and the recipes that they become. What keys mean is from verl's documentation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from from_verl import main

from rlhf_megatron.planning.layout_search import find_layouts
from rlhf_megatron.recipe import RLRecipe, load_rl
from rlhf_megatron.recipe.world_checks import check_world

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

MEGATRON = [
    "--config-name=ppo_megatron_trainer.yaml",
    "algorithm.adv_estimator=grpo",
    "data.train_files=['/data/train.parquet']",
    "data.val_files=/data/test.parquet",
    "data.train_batch_size=64",
    "data.max_response_length=1024",
    "data.filter_overlong_prompts=True",
    "actor_rollout_ref.model.path=/models/some",
    f"{ACTOR}.optim.lr=1e-6",
    f"{ACTOR}.ppo_mini_batch_size=16",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
    f"{ACTOR}.megatron.tensor_model_parallel_size=4",
    f"{ACTOR}.use_kl_loss=True",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.n=5",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
    "trainer.logger=['console','wandb']",
    "trainer.experiment_name=one two",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=2",
    "trainer.save_freq=20",
    "trainer.max_actor_ckpt_to_keep=3",
    "trainer.test_freq=5",
    "trainer.total_epochs=3",
]


def translated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0
) -> tuple[RLRecipe, str, str]:
    """Return the recipe of a command, and what the tool printed to stdout and to stderr; 1 is the status with
    refusals."""
    output = tmp_path / "recipe.yaml"
    assert main(["--output", str(output), *arguments]) == status
    printed = capsys.readouterr()
    return load_rl(output), printed.out, printed.err


def at(recipe: RLRecipe, path: str) -> Any:
    value: Any = recipe
    for key in path.split("."):
        value = getattr(value, key)
    return value


def test_a_command_on_megatron_becomes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out, err = translated(tmp_path, capsys, "--rows", "200", *MEGATRON)
    assert err == "", "there is nothing that verl does otherwise"
    assert (recipe.name, recipe.steps) == ("one-two", 9), "epochs of three whole batches"
    assert (recipe.data.train_files, recipe.data.overlong_prompts) == (["/data/train.parquet"], "drop")
    assert (recipe.batch.prompts_per_step, recipe.batch.minibatch_prompts) == (64, 16)
    layout = recipe.actor.layout
    assert (layout.tensor, layout.pipeline, layout.data) == (4, 2, None)
    assert recipe.reference is not None and recipe.reference.layout is not None
    assert (recipe.reference.layout.tensor, recipe.reference.layout.pipeline) == (2, 2), (
        "as the actor's, where not given"
    )
    assert recipe.actor.sequence_parallel and recipe.actor.optimizer.learning_rate == 1e-6
    row = 512 + 1024
    budgets = recipe.actor.tokens_per_gpu, recipe.actor.logprob_tokens_per_gpu, recipe.reference.tokens_per_gpu
    assert budgets == (4 * row, 8 * row, 8 * row)
    algorithm = recipe.algorithm
    assert (algorithm.advantage, algorithm.normalize_by_std, algorithm.clip_ratio_dual) == ("grpo", True, 3.0)
    assert (algorithm.kl_coef, algorithm.kl_placement, algorithm.kl_estimator) == (0.001, "loss", "k3")
    assert (recipe.checkpoint.save_interval, recipe.checkpoint.keep_last_k, recipe.evaluation.interval) == (20, 3, 5)
    assert recipe.monitor.trackers == ["jsonl", "wandb"]
    assert "python launch/submit.py" in out and "--nodes 2" in out
    check_world(recipe, 16)


OVERLAPPED = [
    f"+{ACTOR}.megatron.override_ddp_config.{key}=True" for key in ("overlap_grad_reduce", "overlap_param_gather")
]
PLAIN = ["--rows=4096", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"]


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        # As verl's trainers step their schedules once in each step of the run, whatever its minibatches.
        ([f"{ACTOR}.optim.lr_warmup_steps=10", "data.train_batch_size=512"], "actor.optimizer.warmup_steps", 20),
        (["trainer.total_training_steps=50", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"],
         "actor.optimizer.warmup_steps", 20),
        # All of verl's engines take the share where lr_warmup_steps is not above 0, Megatron's that of lr_decay_steps.
        (["trainer.total_training_steps=50", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1",
          f"{ACTOR}.optim.lr_warmup_steps=0"], "actor.optimizer.warmup_steps", 20),
        (["trainer.total_training_steps=50", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1", "model_engine=megatron",
          f"{ACTOR}.optim.lr_decay_steps=100"], "actor.optimizer.warmup_steps", 40),
        # config/optim/veomni.yaml has a cosine, torchtitan.yaml a line to min_lr_factor, which 1 makes a constant.
        (["model_engine=veomni"], "actor.optimizer.schedule", "cosine"),
        (["model_engine=veomni", f"{ACTOR}.optim.lr_min=1e-7"], "actor.optimizer.min_learning_rate", 1e-7),
        (["model_engine=veomni", f"{ACTOR}.optim.lr_scheduler_type=constant"], "actor.optimizer.schedule", "constant"),
        (["model_engine=torchtitan"], "actor.optimizer.schedule", "linear"),
        (["model_engine=torchtitan", f"{ACTOR}.optim.min_lr_factor=0.1", f"{ACTOR}.optim.lr=1e-5"],
         "actor.optimizer.min_learning_rate", 1e-6),
        (["model_engine=torchtitan", f"{ACTOR}.optim.min_lr_factor=1.0"], "actor.optimizer.schedule", "constant"),
        # optimizer.py: lr_scheduler_type = warmup_style, where it is not null.
        ([f"{ACTOR}.optim.lr_scheduler_type=constant", f"{ACTOR}.optim.warmup_style=cosine"],
         "actor.optimizer.schedule", "cosine"),
        ([f"{ACTOR}.optim.lr_decay_style=cosine", f"{ACTOR}.optim.min_lr=1e-7"], "actor.optimizer.min_learning_rate",
         1e-7),
        ([f"{ACTOR}.optim.warmup_style=cosine", f"{ACTOR}.optim.min_lr_ratio=0.1", f"{ACTOR}.optim.lr=1e-5"],
         "actor.optimizer.min_learning_rate", 1e-6),
        ([f"{ACTOR}.optim.betas=[0.9,0.95]"], "actor.optimizer.beta2", 0.95),
        ([f"{ACTOR}.grad_clip=0.5"], "actor.optimizer.clip_grad", 0.5),
        ([f"{ACTOR}.grad_clip=0.5", f"{ACTOR}.optim.clip_grad=0.3"], "actor.optimizer.clip_grad", 0.3),
        ([f"{ACTOR}.clip_ratio=0.1"], "algorithm.clip_ratio_high", 0.2),
        ([f"{ACTOR}.clip_ratio_high=0.28"], "algorithm.clip_ratio_low", 0.2),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio_low=3e-4"], "algorithm.clip_ratio_low", 3e-4),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo"], "algorithm.clip_ratio_dual", None),
        # verl 0.9.1's function of this loss aggregates as it is told to, that of the next one by itself.
        ([f"{ACTOR}.policy_loss.loss_mode=gspo"], "algorithm.loss_aggregation", "token_mean"),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
         "algorithm.loss_aggregation", "sequence_mean_token_mean"),
        ([f"{ACTOR}.policy_loss.loss_mode=geo_mean"], "algorithm.loss_aggregation", "sequence_mean_token_mean"),
        # compute_policy_loss_dppo_tv: clamp(ratio, max=clip_ratio_c), whose default is 3.0 in actor.yaml.
        ([f"{ACTOR}.policy_loss.loss_mode=dppo_tv"], "algorithm.clip_ratio_dual", 3.0),
        ([f"{ACTOR}.policy_loss.loss_mode=dppo_kl", f"{ACTOR}.clip_ratio_c=20"], "algorithm.clip_ratio_dual", 20.0),
        # compute_policy_loss_clip_cov has no dual clip.
        ([f"{ACTOR}.policy_loss.loss_mode=clip_cov"], "algorithm.clip_ratio_dual", None),
        ([f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.tau_neg=1.1"],
         "algorithm.sapo.temperature_negative", 1.1),
        ([f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_low=null", f"{ACTOR}.clip_ratio_high=0.1"],
         "algorithm.clip_ratio_low", 0.1),
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor=4096"],
         "algorithm.loss_constant", 4096),
        # verl's dataloader gives batches of this size, 4096 // 2048 of them an epoch.
        (["algorithm.filter_groups.enable=True", "data.gen_batch_size=2048", "trainer.total_epochs=3"], "steps", 6),
        # agent_loop.py takes config.val_kwargs.temperature, and do_sample is read by nothing.
        ([f"{ROLLOUT}.val_kwargs.temperature=0.6", f"{ROLLOUT}.val_kwargs.do_sample=False"],
         "evaluation.temperature", 0.6),
        ([], "actor.recompute.granularity", "full"),
        (["actor_rollout_ref.actor.strategy=megatron"], "actor.recompute.granularity", "none"),
        ([f"{ACTOR}.policy_loss.loss_mode=kl_cov", f"{ACTOR}.policy_loss.ppo_kl_coef=1"],
         "algorithm.covariance.kl_coef", 1.0),
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.norm_adv_by_std_in_grpo=False"],
         "algorithm.loss_aggregation", "sequence_sum_constant"),
        ([f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=k3+"], "algorithm.kl_gradient", "k2"),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.05"], "algorithm.kl_placement", "reward"),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2"],
         "algorithm.kl_controller.target", 0.2),
        (["global_profiler.steps=[2,4]", "global_profiler.tool=nsys"], "monitor.profile.steps", [2, 4]),
        # ray_trainer.py: every row of every step.
        (["trainer.rollout_data_dir=/kept", f"{ROLLOUT}.n=4", "data.train_batch_size=8",
          f"{ACTOR}.ppo_mini_batch_size=8"], "monitor.rollouts.rows", 32),
        (["data.image_key=null", "actor_rollout_ref.model.path=/models/Qwen3-VL-8B"],
         "model.path", "/models/Qwen3-VL-8B"),
        ([f"{ACTOR}.tis_imp_ratio_cap=3"], "algorithm.rollout_correction.threshold", 3.0),
        (["algorithm.rollout_correction.rollout_is=sequence"], "algorithm.rollout_correction.level", "sequence"),
        (["algorithm.rollout_correction.rollout_rs=geometric",
          "algorithm.rollout_correction.rollout_rs_threshold=1.01"],
         "algorithm.rollout_correction.reject_threshold", 1.01),
        # rollout_corr_helper.py: k1 is log(rollout / trainer), and a bound of it one of that ratio.
        (["algorithm.rollout_correction.rollout_rs=seq_mean_k1",
          "algorithm.rollout_correction.rollout_rs_threshold='0.999_1.001'"],
         "algorithm.rollout_correction.reject_threshold", 1.001),
        (["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_rs=token_k1",
          "algorithm.rollout_correction.rollout_rs_threshold='0.625_1.6'"],
         "algorithm.rollout_correction.threshold_low", 1 / 1.6),
        (["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_rs=token_k1",
          "algorithm.rollout_correction.rollout_rs_threshold='0.625_1.6'"],
         "algorithm.rollout_correction.threshold", 1 / 0.625),
        (["algorithm.rollout_correction.rollout_is=token",
          "algorithm.rollout_correction.rollout_is_threshold=0.5_4.0"], "algorithm.rollout_correction.type", "mis"),
        (["algorithm.rollout_correction.bypass_mode=true"], "algorithm.old_logprobs", "rollout"),
        ([f"{ACTOR}.router_replay.mode=R3", f"{ROLLOUT}.enable_rollout_routing_replay=True"],
         "algorithm.router_replay", "rollout"),
        ([f"{ACTOR}.megatron.router_replay.mode=R3", f"{ROLLOUT}.enable_rollout_routing_replay=True"],
         "algorithm.router_replay", "rollout"),
        (["algorithm.filter_groups.enable=True", "data.gen_batch_size=2048"],
         "algorithm.filter_groups.prompts_per_round", 2048),
        (["reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=128"],
         "algorithm.overlong_buffer.len", 128),
        (["custom_reward_function.path=my.py", "custom_reward_function.name=score"], "reward.function", "my.py:score"),
        (["data.custom_cls.path=my.py", "data.custom_cls.name=Sums"], "data.dataset", "my.py:Sums"),
        (["+data.apply_chat_template_kwargs.enable_thinking=False"], "data.chat_template_kwargs",
         {"enable_thinking": False}),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=20000"], "actor.tokens_per_gpu", 20000),
        ([f"{ACTOR}.fsdp_config.param_offload=True"], "actor.offload.gradients", True),
        ([f"{ACTOR}.megatron.param_offload=True"], "actor.offload.gradients", True),
        ([f"{ACTOR}.megatron.param_offload=True", f"{ACTOR}.megatron.grad_offload=False"], "actor.offload.gradients",
         False),
        ([f"{ACTOR}.ulysses_sequence_parallel_size=4"], "actor.cp_comm_type", "a2a"),
        (["actor_rollout_ref.model.enable_gradient_checkpointing=True"], "actor.recompute.granularity", "full"),
        ([f"{ACTOR}.megatron.override_transformer_config.recompute_granularity=full",
          f"{ACTOR}.megatron.override_transformer_config.recompute_method=block",
          f"{ACTOR}.megatron.override_transformer_config.recompute_num_layers=2"], "actor.recompute.layers", 2),
        ([f"{ACTOR}.megatron.override_transformer_config.recompute_granularity=selective",
          f"{ACTOR}.megatron.override_transformer_config.recompute_modules=[mlp,core_attn]"],
         "actor.recompute.modules", ["mlp", "core_attn"]),
        ([f"{ACTOR}.megatron.override_transformer_config.recompute_granularity=selective",
          f"{ACTOR}.megatron.override_transformer_config.recompute_modules=[layernorm,mlp]"],
         "actor.recompute.modules", ["mlp"]),
        ([f"+{ACTOR}.megatron.override_transformer_config.fp8=e4m3",
          f"+{ACTOR}.megatron.override_transformer_config.fp8_recipe=blockwise",
          f"+{ACTOR}.optim.override_optimizer_config.fp8_recipe=blockwise"], "actor.fp8", "blockwise"),
        (OVERLAPPED[:1], "actor.optimizer.overlap_grad_reduce", True),
        (OVERLAPPED, "actor.optimizer.overlap_param_gather", True),
        (OVERLAPPED[1:], "actor.optimizer.overlap_param_gather", False),
        ([*OVERLAPPED, "actor_rollout_ref.model.lora_rank=8"], "actor.optimizer.overlap_param_gather", False),
        ([f"{ROLLOUT}.free_cache_engine=False"], "rollout.sleep", False),
        ([f"{ROLLOUT}.val_kwargs.n=4", f"{ROLLOUT}.val_kwargs.temperature=1"], "evaluation.samples_per_prompt", 4),
        ([f"{ROLLOUT}.val_kwargs.n=4"], "evaluation.samples_per_prompt", 1),
        ([], "data.overlong_prompts", "stop"),
        (["data.truncation=left"], "data.overlong_prompts", "stop"),
        (["data.val_files=null", "trainer.test_freq=5"], "evaluation.interval", 0),
        ([], "rollout.max_num_seqs", 256),
        ([f"{ROLLOUT}.expert_parallel_size=2"], "rollout.layout.expert_parallel", True),
        ([f"{ROLLOUT}.response_length=300"], "rollout.max_response_length", 300),
        ([f"{ACTOR}.use_prefix_grouper=True"], "actor.shared_prompts", True),
        ([f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_max_token_len_per_gpu=9999",
          f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"], "actor.tokens_per_gpu", 2048),
        ([f"{ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction=0.5",
          f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True"],
         "actor.offload.streamed_optimizer", 0.5),
        ([f"{ACTOR}.optim.exp_avg_dtype=bf16", f"{ACTOR}.optim.exp_avg_sq_dtype=bf16"],
         "actor.optimizer.state_dtype", "bfloat16"),
        (["model_engine=megatron", f"+{ACTOR}.optim.override_optimizer_config.use_precision_aware_optimizer=True"],
         "actor.optimizer.master_remainders", True),
        (["model_engine=megatron", f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
          f"+{ACTOR}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=6"],
         "actor.layout.last_stage_layers", 6),
        (["reward.custom_reward_function.path=my.py"], "reward.function", "my.py:compute_score"),
        (["+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
          "+reward.reward_kwargs.overlong_buffer_cfg.len=128"], "algorithm.overlong_buffer.len", 128),
    ],
)  # fmt: skip
def test_what_keys_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], path: str, value: Any
) -> None:
    recipe, _, err = translated(tmp_path, capsys, *PLAIN, *arguments)
    found = at(recipe, path)
    assert found == (pytest.approx(value) if isinstance(value, float) else value)
    assert "has no counterpart" not in err


def test_verls_defaults_are_ppo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * 2100}), tmp_path / "train.parquet")
    judge = ["reward_model.enable=True", "reward_model.model.path=/models/judge", "critic.model.path=/models/judge"]
    files = [f"data.train_files={tmp_path / 'train.parquet'}", "trainer.total_epochs=5", "trainer.critic_warmup=2"]
    recipe, _, _ = translated(tmp_path, capsys, *judge, *files, "critic.cliprange_value=0.2")
    assert recipe.steps == 5 * (2100 // 1024)
    assert (recipe.algorithm.advantage, recipe.algorithm.loss_aggregation) == ("gae", "token_mean")
    assert recipe.critic is not None and recipe.reward_model is not None and recipe.reference is None
    assert (recipe.critic.path, recipe.critic.value_clip, recipe.critic.warmup_steps) == ("/models/judge", 0.2, 1)
    assert recipe.critic.optimizer.learning_rate == 1e-5 != recipe.actor.optimizer.learning_rate
    assert (recipe.reward.rule, recipe.reward_model.path) == ("none", "/models/judge")


def test_adapters_bring_their_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "actor_rollout_ref.model"
    some = f"{model}.target_modules=[q_proj,v_proj]"
    recipe, _, err = translated(
        tmp_path,
        capsys,
        *PLAIN,
        f"{model}.lora_rank=64",
        f"{model}.lora_adapter_path=/a",
        some,
        f"{ACTOR}.use_kl_loss=True",
    )
    lora = recipe.actor.lora
    assert lora is not None and recipe.reference is None and recipe.reference_is_base and "lora" not in err
    assert (lora.rank, lora.scale, lora.modules, lora.path) == (64, 16 / 64, ("q_proj", "v_proj"), "/a")
    layers = f"{model}.lora.target_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]"
    recipe, _, err = translated(
        tmp_path,
        capsys,
        "--rows=1000",
        *MEGATRON,
        f"{model}.lora.rank=32",
        layers,
        f"{model}.lora.dropout=0.1",
        status=1,
    )
    lora = recipe.actor.lora
    assert lora is not None and recipe.reference is None
    assert (lora.rank, lora.scale, lora.target_modules) == (32, 1.0, "all-linear")
    assert "adapters have no dropout" in err and "have gate and up, and each expert" in err


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (f"{ROLLOUT}.name=sglang", "the rollout is vLLM's"),
        ("trainer.logger=[console,swanlab]", "swanlab cannot be written to"),
        (f"{ACTOR}.clip_ratio=0.1", "clip_ratio=0.1: verl's losses read clip_ratio_low and clip_ratio_high"),
        (f"{ACTOR}.shuffle=True", "minibatches are in the order of the data"),
        ("trainer.save_freq=5", "checkpoint.keep_last_k keeps 2, and verl all"),
        (f"{ACTOR}.megatron.param_offload=", "param_offload=: has no value, so verl's default is taken"),
        (f"{ACTOR}.policy_loss.loss_mode=", "loss_mode=: has no value, so verl's default is taken"),
        ("data.truncation=left", "prompts are never cut"),
        ("global_profiler.tool=npu", "steps are recorded by torch and nsys alone"),
        ("trainer.rollout_data_dir=/kept", "rows are kept in rollouts/ of the run's folder"),
        ("data.val_max_samples=5", "are the first rows, and verl's are drawn"),
        # core_algos.py: alpha = rows / count_nonzero(rewards); masked_whiten over tokens; top-k in a micro-batch.
        ("algorithm.adv_estimator=gpg", "alpha is over groups whose rewards differ"),
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline", "the deviation is that of responses"),
        (f"{ACTOR}.policy_loss.loss_mode=kl_cov", "tokens are chosen in the whole minibatch"),
        (f"{ACTOR}.use_rollout_log_probs=True", "read by verl 0.7 alone"),
        (f"{ACTOR}.grad_clip=0.5", "verl from 0.8 on reads optim.clip_grad alone; 0.5 is taken"),
        (f"{ACTOR}.torchtitan.dtype=float32", "give it as fsdp_config.dtype"),
        # Rotary embeddings do not read it, so it only says how long rows may be.
        (
            "+actor_rollout_ref.model.override_config.max_position_embeddings=32768",
            "raise it there if they may be longer",
        ),
        ("+actor_rollout_ref.model.override_config.model_config.max_position_embeddings=9", "as config.json's max_"),
        ("actor_rollout_ref.model.lora.rank=8", "is of verl's other engine, and with this one it trains all weights"),
        (f"{ACTOR}.policy_loss.loss_mode=gspo", "verl before 0.9.1 averages gspo by sequences"),
        (f"{ROLLOUT}.val_kwargs={{do_sample: false, temperature: 0.6}}", "verl since 0.7 reads the temperature alone"),
        ("algorithm.rollout_correction.rollout_is=token", "weights are of KL and entropy too"),
    ],
)
def test_what_is_not_as_in_verl_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, expected: str
) -> None:
    engine = ["model_engine=megatron"] if "megatron" in argument else []
    _, _, err = translated(tmp_path, capsys, *PLAIN, *engine, argument)
    (line,) = [line for line in err.splitlines() if expected in line]
    assert line.startswith("not as in verl: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([f"{ROLLOUT}.multi_turn.enable=True"], "tools are functions and MCP servers here"),
        (["actor_rollout_ref.model.lora_adapter_path=/a"], "give its rank too, as lora_rank"),
        ([f"{ACTOR}.policy_loss.loss_mode=novel"], "loss_mode=novel: here are vanilla, gspo"),
        ([f"{ACTOR}.optim.lr_decay_style=WSD"], "a schedule WSD is not here"),
        ([f"{ACTOR}.router_replay.mode=R2"], "router_replay.mode=R2: here is R3"),
        (["algorithm.rollout_correction.rollout_rs=token"], "what is kept has its ratio as weight here"),
        (["algorithm.rollout_correction.rollout_rs='seq_mean_k1,seq_max_k2'",
          "algorithm.rollout_correction.rollout_rs_threshold='1.01,2.5'"], "seq_max_k2: here are token_k1"),
        (["algorithm.rollout_correction.rollout_rs=seq_mean_k1",
          "algorithm.rollout_correction.rollout_rs_threshold='0.9_1.001'"], "the lower bound of a mean ratio"),
        (["+some.new_key=7"], "some.new_key=7: is not known"),
        (["+actor_rollout_ref.model.override_config.rope_theta=7"], "change config.json in model.path instead"),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/a"], "checkpoints of verl cannot be read"),
        (["skip.rollout.enable=True"], "responses of an earlier run"),
        ([f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=nvfp4"], "here is fp8, or the rollout's dtype"),
        ([f"+{ROLLOUT}.engine_kwargs.vllm.kv-cache-dtype=fp8"], "kv-cache-dtype=fp8: needs a correction"),
        ([f"{ROLLOUT}.quantization=fp8"], "quantization=fp8: needs a correction"),
        ([f"{ACTOR}.optim.lr_min=1e-7"], "is read with model_engine=veomni alone"),
        (["model_engine=torchtitan", f"{ACTOR}.optim.decay_type=sqrt"], "a schedule sqrt is not here"),
        ([f"+{ROLLOUT}.engine_kwargs.trtllm.kv_cache_config.dtype=fp8"], "the rollout has its own type"),
        ([f"{ACTOR}.veomni.qat_implementation=nvfp4"], "weights are not quantized in training"),
        ([f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp32"], "give it as fsdp_config.dtype"),
        (["data.image_key=images"], "the column images is not read"),
        (["actor_rollout_ref.model.path=/models/Qwen3-VL-8B"], "the column images is not read"),
        (["data.prompt_key=question"], "prompts are in the column prompt"),
        (["reward.reward_manager.name=prime"], "rewards are rules"),
        (["+reward.reward_kwargs.max_resp_len=100"], "the penalty is of the longest response, 512"),
        ([f"{ROLLOUT}.max_model_len=700"], "responses are cut by their own limit alone"),
        (["distillation.enabled=True"], "there is no distillation"),
        (["actor_rollout_ref.model.mtp.enable=True"], "is there where it drafts: enable_rollout"),
        (["-m", "recipe.prime.main_prime"], "a trainer of its own"),
        ([f"{ROLLOUT}.n=1"], "advantages compare the responses to one prompt; 2 is written"),
    ],
)  # fmt: skip
def test_what_makes_another_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    _, _, err = translated(tmp_path, capsys, *PLAIN, *arguments, status=1)
    lines = [line for line in err.splitlines() if line.startswith("refused: ")]
    assert any(expected in line for line in lines), err
    written = (tmp_path / "recipe.yaml").read_text(encoding="utf-8").splitlines()
    assert written[: len(lines)] == [f"# {line}" for line in lines]


def test_scores_of_dapos_rows_are_told_where_their_spread_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, unscaled = "data.train_files=/data/dapo-math-17k.parquet", "algorithm.norm_adv_by_std_in_grpo=False"
    penalty = ["reward.overlong_buffer.enable=True", "reward.overlong_buffer.len=100"]
    for words, is_told in ((penalty, True), ([rows, unscaled], True), ([rows], False), ([unscaled], False)):
        _, _, err = translated(tmp_path, capsys, *PLAIN, *words)
        assert ("score 1 or 0, verl's 1 or -1" in err) == is_told


def test_losses_of_sequences_average_other_terms_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sapo, divergence = f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.use_kl_loss=True"
    by_sequences = f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"
    for words, is_told in (([sapo, divergence], True), ([sapo], False), ([sapo, divergence, by_sequences], False)):
        _, _, err = translated(tmp_path, capsys, *PLAIN, *words)
        assert ("KL and entropy are averaged by sequences too" in err) == is_told


def test_columns_of_images_and_agents_are_refused_where_the_files_have_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for column, status in (("images", 1), ("agent_name", 1), ("answer", 0)):
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], column: ["b"]}), tmp_path / "train.parquet")
        files = [f"data.train_files={tmp_path / 'train.parquet'}", "data.image_key=images"]
        translated(tmp_path, capsys, *PLAIN, *files, status=status)


def test_options_of_python_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-u", "-X", "faulthandler", "-m", "recipe.dapo.main_dapo"]
    recipe, _, err = translated(tmp_path, capsys, *options, *PLAIN, f"{ROLLOUT}.n=3")
    assert recipe.batch.responses_per_prompt == 3 and "trainer of its own" not in err


def test_trainers_with_rollouts_ahead_have_gpus_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ahead = ["-m", "verl.experimental.one_step_off_policy.main_ppo", "trainer.n_gpus_per_node=6", "rollout.nnodes=2"]
    recipe, out, _ = translated(tmp_path, capsys, *PLAIN, *ahead, "trainer.nnodes=2", "rollout.n_gpus_per_node=2")
    assert (recipe.actor.ranks, recipe.rollout.ranks, recipe.cluster.gpus_per_node) == ("0-11", "12-15", 8)
    assert (recipe.rollout.steps_ahead, recipe.algorithm.old_logprobs) == (1, "rollout") and "--nodes 2" in out
    module = ["--config-path=config", "--config-name=fully_async_ppo_trainer.yaml", "data.train_batch_size=0"]
    sizes = [f"{ACTOR}.ppo_mini_batch_size=32", "async_training.require_batches=2", "rollout.total_rollout_steps=2560"]
    sizes += [f"{ACTOR}.optim.lr_warmup_steps=3", f"{ACTOR}.optim.lr_scheduler_type=cosine"]
    recipe, _, err = translated(tmp_path, capsys, *PLAIN, *module, *sizes)
    # A weight sync after 4 updates of 2 minibatches.
    assert (recipe.batch.prompts_per_step, recipe.batch.minibatch_prompts, recipe.steps) == (256, 32, 10)
    # fully_async_trainer.py: the schedule steps with each update, and its total is that of the syncs.
    assert (recipe.actor.optimizer.warmup_steps, recipe.actor.optimizer.decay_steps) == (3 * 2, 10 * 2)
    assert (recipe.rollout.partial, recipe.rollout.max_staleness) == ("resume", 2)
    assert "not as in verl: async_training.staleness_threshold=0.1: the next step is generated" in err
    # fully_async_rollouter.py: the fewer of total_rollout_steps and of the epochs' rows, whatever the trainer's steps.
    few = ["trainer.total_epochs=1", "trainer.total_training_steps=3", "--rows=600"]
    recipe, _, err = translated(tmp_path, capsys, *PLAIN[1:], *module, *sizes[:3], *few)
    assert recipe.steps == 2 and "this trainer reads rollout.total_rollout_steps" in err
    recipe, _, err = translated(tmp_path, capsys, *PLAIN[1:], *module, *sizes[:3], "data.train_files=/nowhere.parquet")
    assert recipe.steps == 10 and "verl ends after trainer.total_epochs, if sooner; give --rows" in err


def test_veomnis_schedules_warm_up_for_a_share_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model_engine=veomni", f"{ACTOR}.optim.lr_warmup_steps=7"]
    recipe, _, err = translated(tmp_path, capsys, *PLAIN, *words)
    assert recipe.actor.optimizer.warmup_steps == 0 and "read lr_warmup_steps_ratio alone" in err


def test_plan_writes_the_layout_that_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(__file__).parents[2] / "recipes" / "models" / "qwen2.5-0.5b"
    sizes = ["trainer.n_gpus_per_node=2", f"{ROLLOUT}.tensor_model_parallel_size=1", f"model.config={config}"]
    recipe, _, err = translated(tmp_path, capsys, "--plan", *PLAIN, *sizes, "cluster.gpu=H200")
    found = find_layouts(recipe, 2)
    assert found[0].overrides == () and recipe.cluster.gpu == "H200" and err == ""
    assert main(["--output", str(tmp_path / "none.yaml"), "--plan", *PLAIN, *sizes, "cluster.gpu_memory_gb=1"]) == 2
    assert "error: --plan: no layout fits 2 GPUs of 1 GB" in capsys.readouterr().err
    # Micro-batches that do not fit are left to the run.
    recipe, _, _ = translated(tmp_path, capsys, "--plan", *PLAIN, *sizes, f"{ACTOR}.ppo_max_token_len_per_gpu=9000000")
    assert recipe.actor.tokens_per_gpu == "auto" and recipe.actor.logprob_tokens_per_gpu is None
    longer = [*sizes, "data.max_response_length=99000"]
    assert main(["--output", str(tmp_path / "none.yaml"), "--plan", *PLAIN, *longer]) == 2
    assert "over 2 GPUs: rollout.max_response_length=99000 + " in capsys.readouterr().err


def test_files_of_ones_own_are_composed_by_hydra(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hydra", reason="hydra-core 1.3 is not installed (its ANTLR is not math-verify's here)")
    (tmp_path / "base.yaml").write_text("data: {train_batch_size: 512}\nactor_rollout_ref: {rollout: {n: 4}}\n")
    (tmp_path / "mine.yaml").write_text(
        "defaults: [base, _self_]\nalgorithm: {adv_estimator: rloo}\n"
        "data: {max_response_length: 700, max_prompt_length: '${data.train_batch_size}'}\n"
    )
    files = ["--config-path", str(tmp_path), "--config-name", "mine"]
    recipe, _, _ = translated(tmp_path, capsys, "--rows=4096", *files, "data.max_response_length=300")
    assert (recipe.algorithm.advantage, recipe.batch.responses_per_prompt) == ("rloo", 4)
    assert (recipe.data.max_prompt_length, recipe.rollout.max_response_length) == (512, 300)
    assert main(["--output", str(tmp_path / "none.yaml"), *files, "nowhere.is=3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "Hydra cannot compose it" in line


def test_without_hydra_files_of_ones_own_get_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hydra", None)  # Python's own mark of a module that cannot be imported
    for words in (["--config-name=mine"], ["actor@actor_rollout_ref.actor=mine"], ["hydra.searchpath=[file://a]"]):
        assert main(["--output", str(tmp_path / "none.yaml"), *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: --config-name=") and "pip install 'hydra-core==1.3.*'" in line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-m", "verl.trainer.sft_trainer"], "only commands of reinforcement learning are converted"),
        (["grpo"], "grpo: not of the form key=value"),
        (["trainer.total_epochs=many", "--rows=5000"], "trainer.total_epochs=many: must be a number"),
        ([f"{ACTOR}.optim.betas=[0.9]", "--rows=5000"], "must be two numbers"),
        ([f"{ACTOR}.ppo_mini_batch_size=${{data.train_batch_size}}"], "neither Hydra's nor a shell's expressions"),
        (["actor_rollout_ref.model.path=null", "--rows=5000"], "model.path: name the model's folder"),
        (["data.train_files=/nowhere.parquet", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"],
         "give trainer.total_training_steps, or --rows"),
        (["--rows=5000", "data.train_batch_size=1000", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"],
         "minibatch_prompts=256 must divide prompts_per_step=1000"),
    ],
)  # fmt: skip
def test_a_command_that_makes_no_recipe_gets_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    output = tmp_path / "recipe.yaml"
    assert main(["--output", str(output), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and expected in line
    assert not output.exists()


WRONG_KINDS = [
    f"{ACTOR}=3", "actor_rollout_ref=x", "algorithm=[]", "trainer=null", "critic=7", f"{ACTOR}.optim=3",
    f"{ROLLOUT}.val_kwargs=3", "algorithm.kl_ctrl=3", "algorithm.filter_groups=3", "custom_reward_function=3",
    "algorithm.adv_estimator=[]", f"{ACTOR}.policy_loss.loss_mode={{}}", f"{ACTOR}.use_kl_loss=3",
    "algorithm.use_kl_in_reward=maybe", f"{ACTOR}.megatron.sequence_parallel=x", f"{ROLLOUT}.val_kwargs.do_sample=x",
    "reward_model.enable=3", "data.max_prompt_length=null", "data.max_response_length=null",
    "trainer.total_training_steps=.inf", "trainer.total_training_steps=1.5", "trainer.total_epochs=-1",
    "trainer.nnodes=0", "trainer.nnodes=1.5", "trainer.test_freq=null", "trainer.logger=3",
    "trainer.experiment_name=[]", f"{ACTOR}.ppo_max_token_len_per_gpu=.inf", f"{ACTOR}.optim.lr=.nan",
    f"{ACTOR}.ulysses_sequence_parallel_size=0", f"{ACTOR}.optim.lr_scheduler_type=[]",
    "actor_rollout_ref.model.lora_rank=.inf", "custom_reward_function.path=[a.py]", "data.train_files=[[x]]",
    "data.custom_cls.path=[a.py]",
    "algorithm.rollout_correction.rollout_is=[]", "a..b=3", "=3", "data.train_files=/a\x00b",
]  # fmt: skip


@pytest.mark.parametrize("argument", WRONG_KINDS)
def test_a_value_of_the_wrong_kind_makes_no_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str
) -> None:
    output = tmp_path / "recipe.yaml"
    assert main(["--output", str(output), "--rows=5000", *PLAIN, argument]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and line.isprintable() and not output.exists()


def test_a_mapping_is_the_keys_in_it_and_home_is_written_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mapping = f"{ACTOR}.optim={{lr: 2e-6, weight_decay: 0.5}}"
    recipe, _, _ = translated(tmp_path, capsys, *PLAIN, mapping, "trainer.default_local_dir=~/runs")
    assert (recipe.actor.optimizer.learning_rate, recipe.actor.optimizer.weight_decay) == (2e-6, 0.5)
    assert recipe.run_root == str(Path.home() / "runs")


def test_speculative_decoding_without_weights_is_translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config"
    ngram = (f"{key}.method=ngram", f"{key}.num_speculative_tokens=5", f"{key}.prompt_lookup_min=2")
    recipe, _, err = translated(tmp_path, capsys, "--rows=640", *MEGATRON, *ngram)
    section = recipe.rollout.speculative
    assert section is not None and (section.method, section.num_speculative_tokens, section.match) == ("ngram", 5, 2)
    assert "speculative_config" not in err
    recipe, _, err = translated(tmp_path, capsys, "--rows=640", *MEGATRON, f"{key}.method=eagle3")
    assert recipe.rollout.speculative is None
    assert "speculative_config.method=eagle3: drafts are text" in err
    words = (f"{key}.method=eagle3", f"{key}.model=/heads/one", f"{key}.num_speculative_tokens=4")
    recipe, _, err = translated(tmp_path, capsys, "--rows=640", *MEGATRON, *words)
    section = recipe.rollout.speculative
    assert section is not None and (section.method, section.path) == ("eagle3", "/heads/one")
    assert "speculative_config" not in err


def test_a_layer_that_drafts_is_translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = "actor_rollout_ref.model.mtp"
    words = (f"{key}.enable=True", f"{key}.enable_rollout=True", f"{key}.num_speculative_tokens=2")
    recipe, _, err = translated(tmp_path, capsys, "--rows=640", *MEGATRON, *words)
    section = recipe.rollout.speculative
    assert section is not None and (section.method, section.num_speculative_tokens) == ("mtp", 2)
    assert not section.learns and "mtp" not in err
    overlap = f"+{ACTOR}.megatron.override_ddp_config.overlap_grad_reduce=True"
    recipe, _, err = translated(tmp_path, capsys, "--rows=640", *MEGATRON, *words, f"{key}.enable_train=True", overlap)
    section, optimizer = recipe.rollout.speculative, recipe.actor.optimizer
    assert section is not None and optimizer.overlap_grad_reduce
    assert section.optimizer == optimizer.model_copy(update={"overlap_grad_reduce": False})
    assert "the layer has a loss and an optimizer of its own" in err


def test_a_cache_in_8_bits_is_translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("algorithm.rollout_correction.rollout_is=token", f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8_e4m3")
    recipe, _, err = translated(tmp_path, capsys, "--rows=640", *MEGATRON, *words)
    assert recipe.rollout.kv_cache_dtype == "fp8" and "kv_cache_dtype" not in err


def test_epochs_of_rows_elsewhere_stay_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.train_files=/nowhere.parquet", "trainer.total_epochs=3", "algorithm.adv_estimator=grpo"]
    recipe, _, told = translated(tmp_path, capsys, *words, f"{ROLLOUT}.n=4")
    assert (recipe.steps, recipe.epochs) == (0, 3.0)
    assert "not as in verl: trainer.total_epochs=3: is epochs: the run counts its steps" in told


def test_roles_have_types_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rows=5000", "algorithm.adv_estimator=gae", f"{ACTOR}.fsdp_config.dtype=float16"]
    recipe, _, _ = translated(tmp_path, capsys, *words)
    assert recipe.critic is not None and (recipe.model.dtype, recipe.critic.dtype) == ("float16", "bfloat16")
    recipe, _, _ = translated(tmp_path, capsys, *words, "critic.fsdp_config.dtype=float16")
    assert recipe.critic is not None and recipe.critic.dtype is None
