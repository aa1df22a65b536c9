"""tools/verl: commands of verl, and the recipes that they become. What keys mean is from verl's documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from from_verl import main

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


def translated(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[RLRecipe, str, str]:
    """The recipe of a command, and what the tool printed to stdout and to stderr."""
    output = tmp_path / "recipe.yaml"
    assert main(["--output", str(output), *arguments]) == 0
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


PLAIN = ["--rows=4096", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"]


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        # As verl's trainers step their schedules once in each step of the run, whatever its minibatches.
        ([f"{ACTOR}.optim.lr_warmup_steps=10", "data.train_batch_size=512"], "actor.optimizer.warmup_steps", 20),
        (["trainer.total_training_steps=50", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"],
         "actor.optimizer.warmup_steps", 20),
        ([f"{ACTOR}.optim.lr_decay_style=cosine", f"{ACTOR}.optim.min_lr=1e-7"], "actor.optimizer.min_learning_rate",
         1e-7),
        ([f"{ACTOR}.optim.warmup_style=cosine", f"{ACTOR}.optim.min_lr_ratio=0.1", f"{ACTOR}.optim.lr=1e-5"],
         "actor.optimizer.min_learning_rate", 1e-6),
        ([f"{ACTOR}.optim.betas=[0.9,0.95]"], "actor.optimizer.beta2", 0.95),
        ([f"{ACTOR}.grad_clip=0.5"], "actor.optimizer.clip_grad", 0.5),
        ([f"{ACTOR}.clip_ratio=0.1"], "algorithm.clip_ratio_high", 0.2),
        ([f"{ACTOR}.clip_ratio_high=0.28"], "algorithm.clip_ratio_low", 0.2),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio_low=3e-4"], "algorithm.clip_ratio_low", 3e-4),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo"], "algorithm.clip_ratio_dual", None),
        # verl's function of this loss aggregates so itself.
        ([f"{ACTOR}.policy_loss.loss_mode=gspo"], "algorithm.loss_aggregation", "sequence_mean_token_mean"),
        # verl's dataloader gives batches of this size, 4096 // 2048 of them an epoch.
        (["algorithm.filter_groups.enable=True", "data.gen_batch_size=2048", "trainer.total_epochs=3"], "steps", 6),
        ([f"{ROLLOUT}.val_kwargs.temperature=0.6", f"{ROLLOUT}.val_kwargs.do_sample=False"],
         "evaluation.temperature", 0.0),
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
        ([f"{ACTOR}.tis_imp_ratio_cap=3"], "algorithm.rollout_correction.threshold", 3.0),
        (["algorithm.rollout_correction.rollout_is=sequence"], "algorithm.rollout_correction.level", "sequence"),
        (["algorithm.rollout_correction.rollout_rs=geometric",
          "algorithm.rollout_correction.rollout_rs_threshold=1.01"],
         "algorithm.rollout_correction.reject_threshold", 1.01),
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
        (["+data.apply_chat_template_kwargs.enable_thinking=False"], "data.chat_template_kwargs",
         {"enable_thinking": False}),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=20000"], "actor.tokens_per_gpu", 20000),
        ([f"{ACTOR}.fsdp_config.param_offload=True"], "actor.offload.gradients", True),
        ([f"{ACTOR}.megatron.param_offload=True"], "actor.offload.gradients", False),
        ([f"{ACTOR}.ulysses_sequence_parallel_size=4"], "actor.cp_comm_type", "a2a"),
        (["actor_rollout_ref.model.enable_gradient_checkpointing=True"], "actor.recompute.granularity", "full"),
        ([f"{ACTOR}.megatron.override_transformer_config.recompute_granularity=full",
          f"{ACTOR}.megatron.override_transformer_config.recompute_method=block",
          f"{ACTOR}.megatron.override_transformer_config.recompute_num_layers=2"], "actor.recompute.layers", 2),
        ([f"{ROLLOUT}.free_cache_engine=False"], "rollout.sleep", False),
        ([f"{ROLLOUT}.val_kwargs.n=4", f"{ROLLOUT}.val_kwargs.temperature=1"], "evaluation.samples_per_prompt", 4),
        (["data.truncation=left"], "data.overlong_prompts", "drop"),
        ([], "data.overlong_prompts", "stop"),
        (["data.val_files=null", "trainer.test_freq=5"], "evaluation.interval", 0),
        ([], "rollout.max_num_seqs", 1024),
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
        tmp_path, capsys, "--rows=1000", *MEGATRON, f"{model}.lora.rank=32", layers, f"{model}.lora.dropout=0.1"
    )
    lora = recipe.actor.lora
    assert lora is not None and recipe.reference is None
    assert (lora.rank, lora.scale, lora.target_modules) == (32, 1.0, "all-linear")
    assert "adapters have no dropout" in err and "have gate and up, and each expert" in err


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (f"{ROLLOUT}.multi_turn.enable=True", "tools are a function here"),
        ("actor_rollout_ref.model.lora_adapter_path=/a", "give its rank too, as lora_rank"),
        (f"{ROLLOUT}.name=sglang", "the rollout is vLLM's"),
        (f"{ACTOR}.policy_loss.loss_mode=novel", "loss_mode=novel: here are vanilla, gspo"),
        (f"{ACTOR}.optim.lr_decay_style=WSD", "a schedule WSD is not here"),
        ("trainer.logger=[console,swanlab]", "swanlab cannot be written to"),
        ("actor_rollout_ref.model.path=Qwen/Qwen3-8B", "Qwen3-8B: names on a hub are not looked up"),
        (f"{ACTOR}.clip_ratio=0.1", "clip_ratio=0.1: verl's losses read clip_ratio_low and clip_ratio_high"),
        (f"{ACTOR}.shuffle=True", "minibatches are in the order of the data"),
        (f"{ACTOR}.router_replay.mode=R2", "router_replay.mode=R2: here is R3"),
        ("algorithm.rollout_correction.rollout_rs=token", "what is kept has its ratio as weight too"),
        ("+some.new_key=7", "some.new_key=7: has no counterpart, or is not known"),
        ("trainer.save_freq=5", "checkpoint.keep_last_k keeps 2, and verl all"),
    ],
)
def test_what_is_not_as_in_verl_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, expected: str
) -> None:
    _, _, err = translated(tmp_path, capsys, *PLAIN, argument)
    (line,) = [line for line in err.splitlines() if expected in line]
    assert line.startswith("not as in verl: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["grpo"], "grpo: not of the form key=value"),
        (["trainer.total_epochs=many", "--rows=5000"], "trainer.total_epochs=many: must be a number"),
        ([f"{ACTOR}.optim.betas=[0.9]", "--rows=5000"], "must be two numbers"),
        ([f"{ACTOR}.ppo_mini_batch_size=${{data.train_batch_size}}"], "neither Hydra's nor a shell's expressions"),
        (["actor_rollout_ref.model.path=null", "--rows=5000"], "model.path: name the model's folder"),
        (["data.train_files=/nowhere.parquet"], "give trainer.total_training_steps, or --rows"),
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
