"""Translation of verl's keys into a recipe, section by section, with verl's defaults for those that are not given.

As of verl 0.6: verl/trainer/config/ppo_trainer.yaml and ppo_megatron_trainer.yaml. Not here: reading a command
(verl_command.py), and what a recipe may hold (rlhf_megatron/recipe/).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
from verl_command import ACTOR, MODEL, REFERENCE, ROLLOUT, Command

from rlhf_megatron.errors import RecipeError

# key of verl -> (verl's default, key of a recipe), where the values mean the same.
SAME: dict[str, tuple[Any, str]] = {
    "data.tokenizer": (None, "model.tokenizer"),
    "data.max_prompt_length": (512, "data.max_prompt_length"),
    "data.max_response_length": (512, "rollout.max_response_length"),
    "data.train_batch_size": (1024, "batch.prompts_per_step"),
    "data.shuffle": (True, "data.shuffle"),
    "data.apply_chat_template_kwargs": ({}, "data.chat_template_kwargs"),
    f"{MODEL}.path": ("~/models/deepseek-llm-7b-chat", "model.path"),
    f"{MODEL}.trust_remote_code": (False, "model.trust_remote_code"),
    f"{ACTOR}.ppo_mini_batch_size": (256, "batch.minibatch_prompts"),
    f"{ACTOR}.ppo_epochs": (1, "batch.epochs_per_step"),
    f"{ACTOR}.entropy_coeff": (0, "algorithm.entropy_coef"),
    f"{ROLLOUT}.n": (1, "batch.responses_per_prompt"),
    f"{ROLLOUT}.temperature": (1.0, "rollout.temperature"),
    f"{ROLLOUT}.top_p": (1, "rollout.top_p"),
    f"{ROLLOUT}.top_k": (-1, "rollout.top_k"),
    f"{ROLLOUT}.gpu_memory_utilization": (0.5, "rollout.gpu_memory_utilization"),
    f"{ROLLOUT}.tensor_model_parallel_size": (2, "rollout.layout.tensor"),
    f"{ROLLOUT}.max_num_seqs": (1024, "rollout.max_num_seqs"),
    f"{ROLLOUT}.max_num_batched_tokens": (8192, "rollout.max_num_batched_tokens"),
    f"{ROLLOUT}.enforce_eager": (False, "rollout.enforce_eager"),
    f"{ROLLOUT}.enable_chunked_prefill": (True, "rollout.enable_chunked_prefill"),
    f"{ROLLOUT}.enable_prefix_caching": (True, "rollout.enable_prefix_caching"),
    f"{ROLLOUT}.free_cache_engine": (True, "rollout.sleep"),
    f"{ROLLOUT}.val_kwargs.n": (1, "evaluation.samples_per_prompt"),
    f"{ROLLOUT}.val_kwargs.top_p": (1.0, "evaluation.top_p"),
    "trainer.val_before_train": (True, "evaluation.at_start"),
    "trainer.n_gpus_per_node": (8, "cluster.gpus_per_node"),
}
ADVANTAGES = {
    "gae": "gae", "grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo", "opo": "opo",
    "remax": "remax", "gpg": "gpg", "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}  # fmt: skip
POLICY_LOSSES = {
    "vanilla": "clip", "gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo", "sapo": "sapo", "gpg": "reinforce",
    "clip_cov": "clip_cov", "kl_cov": "kl_cov", "dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl",
}  # fmt: skip
AGGREGATIONS = {
    "token-mean": "token_mean", "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean", "seq-mean-token-sum-norm": "sequence_sum_constant",
}  # fmt: skip
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
# Roles in verl's configuration, and the section of ours.
ROLES = {ACTOR: "actor", REFERENCE: "reference", "critic": "critic", "reward_model": "reward_model"}
DEGREES = {
    "tensor_model_parallel_size": "tensor", "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline", "context_parallel_size": "context",
    "expert_model_parallel_size": "expert", "expert_tensor_parallel_size": "expert_tensor",
}  # fmt: skip


# Megatron's linear layers, and what they hold by Hugging Face's names.
LINEAR_LAYERS = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"], "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"], "linear_fc2": ["down_proj"],
}  # fmt: skip


class Tree(dict[str, Any]):
    """Plain values of a recipe, set by paths of keys."""

    def put(self, path: str, value: Any) -> None:
        """Sets a key; null is not written, since the default says as much."""
        if value is None:
            return
        if isinstance(value, str) and value.startswith("~/"):
            value = str(Path(value).expanduser())
        *parents, last = path.split(".")
        section: dict[str, Any] = self
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value


def translate(command: Command, rows: int | None) -> dict[str, Any]:
    """A recipe's plain values for a command; ``rows`` of the training files, where they are not to be counted.

    Raises RecipeError where the number of steps cannot be known.
    """
    tree = Tree()
    put, take = tree.put, command.take
    name = re.sub(r"[^A-Za-z0-9._+=-]+", "-", _name_of(command)).strip("-.") or "from_verl"
    put("name", name)
    put("loop", "rl")
    tree["steps"] = 0
    if not isinstance(command.given.get(f"{MODEL}.path", ""), str):
        raise RecipeError(f"{MODEL}.path: name the model's folder")
    for key, (default, ours) in SAME.items():
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        put(ours, command.number(key, default) if is_number else take(key, default))
    for key in ("prompts_per_step", "minibatch_prompts"):
        if not isinstance(tree["batch"][key], int) or tree["batch"][key] < 1:
            raise RecipeError(f"batch.{key}={tree['batch'][key]}, of the command's batch sizes: must be 1 or more")
    if rows is not None and rows < 1:
        raise RecipeError(f"--rows={rows}: must be 1 or more")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", tree["model"]["path"]) and not Path(tree["model"]["path"]).exists():
        command.remark(f"{MODEL}.path", "names on a hub are not looked up; download it, and name its folder")
    put("model.dtype", "bfloat16")
    put("seed", command.first("data.seed", f"{ACTOR}.data_loader_seed"))
    put_data(command, tree)
    tree["steps"] = steps_of(command, tree, rows)
    put_algorithm(command, tree)
    put_roles(command, tree)
    put_rewards(command, tree)
    put_operations(command, tree)
    return tree


def _name_of(command: Command) -> str:
    name = command.take("trainer.experiment_name")
    if isinstance(name, list | dict):
        raise RecipeError(f"trainer.experiment_name={name}: must be a text")
    return "gsm8k" if name is None else str(name)


def put_data(command: Command, tree: Tree) -> None:
    """Files, and what becomes of prompts that are too long."""
    for key, ours, default in (("train", "train", "train"), ("val", "validation", "test")):
        files_key = f"data.{key}_files"
        files = command.take(files_key, [] if files_key in command.given else [f"~/data/rlhf/gsm8k/{default}.parquet"])
        listed = files if isinstance(files, list) else [files]
        if not all(isinstance(file, str) for file in listed if file):
            raise RecipeError(f"data.{key}_files={files}: must be names of files")
        tree.put(f"data.{ours}_files", [str(Path(file).expanduser()) for file in listed if file])
    truncation = command.take("data.truncation", "error")
    drops = command.take("data.filter_overlong_prompts", False)
    if not drops and truncation != "error":
        command.remark("data.truncation", "prompts are never cut; those that are too long are left out")
    tree.put("data.overlong_prompts", "stop" if not drops and truncation == "error" else "drop")
    most = command.number("data.val_max_samples")
    tree.put("evaluation.max_prompts", most if most and most > 0 else None)
    if command.number("data.train_max_samples") not in (-1, None):
        command.remark("data.train_max_samples", "all rows are used; make a smaller file")
    if command.take(f"{MODEL}.custom_chat_template"):
        command.remark(f"{MODEL}.custom_chat_template", "write it to a file, and name that in data.chat_template")


def steps_of(command: Command, tree: Tree, rows: int | None) -> int:
    """trainer.total_training_steps, or epochs x whole batches of the training rows.

    With dynamic sampling verl draws batches of data.gen_batch_size, and a step takes one of them at least.
    """
    steps: int | None = command.count("trainer.total_training_steps")
    if steps:
        return steps
    try:
        counted = rows or sum(pyarrow.parquet.read_metadata(file).num_rows for file in tree["data"]["train_files"])
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise RecipeError(
            f"data.train_files: cannot be read here ({str(error).splitlines()[0]}), so the number of steps is unknown; "
            "give trainer.total_training_steps, or --rows"
        ) from error
    filtered = command.take("algorithm.filter_groups.enable", False)
    drawn = (command.number("data.gen_batch_size") if filtered else None) or tree["batch"]["prompts_per_step"]
    if filtered:
        command.remark("algorithm.filter_groups.enable", "steps is the most that verl's epochs can have; check it")
    return max(1, command.count("trainer.total_epochs", 30) * int(counted // drawn))


def put_algorithm(command: Command, tree: Tree) -> None:
    """Advantages, losses, KL, dynamic sampling and correction."""

    def put(key: str, value: Any) -> None:
        tree.put(f"algorithm.{key}", value)

    take = command.take
    advantage = command.choose("algorithm.adv_estimator", "gae", ADVANTAGES)
    put("advantage", advantage)
    if advantage in ("grpo", "gpg"):
        put("normalize_by_std", take("algorithm.norm_adv_by_std_in_grpo", True) if advantage == "grpo" else None)
    if advantage in ("gae", "reinforce_plus_plus"):
        put("gamma", take("algorithm.gamma", 1.0))
    if advantage == "gae":
        put("gae_lambda", take("algorithm.lam", 1.0))
    loss = command.choose(f"{ACTOR}.policy_loss.loss_mode", "vanilla", POLICY_LOSSES)
    put("policy_loss", loss)
    if loss != "reinforce":
        put("clip_ratio_low", take(f"{ACTOR}.clip_ratio_low", 0.2))
        put("clip_ratio_high", take(f"{ACTOR}.clip_ratio_high", 0.2))
    if take(f"{ACTOR}.clip_ratio", 0.2) != 0.2:
        command.remark(f"{ACTOR}.clip_ratio", "verl's losses read clip_ratio_low and clip_ratio_high, which are taken")
    dual = take(f"{ACTOR}.clip_ratio_c", 3.0)
    put("clip_ratio_dual", dual if loss in ("clip", "clip_cov") else None)
    selection = f"{ACTOR}.policy_loss"
    if loss in ("clip_cov", "kl_cov"):
        put("covariance.fraction", take(f"{selection}.{loss}_ratio", 0.0002))
    if loss == "clip_cov":
        put("covariance.low", take(f"{selection}.clip_cov_lb", 1.0))
        put("covariance.high", take(f"{selection}.clip_cov_ub", 5.0))
    if loss == "kl_cov":
        put("covariance.kl_coef", take(f"{selection}.ppo_kl_coef", 0.1))
    aggregation = command.choose(f"{ACTOR}.loss_agg_mode", "token-mean", AGGREGATIONS)
    # verl's losses over sequences are means of the sequences' means, whatever loss_agg_mode says.
    put("loss_aggregation", "sequence_mean_token_mean" if loss in ("gspo", "gmpo", "sapo") else aggregation)
    put_divergence(command, tree)
    if take("algorithm.filter_groups.enable", False):
        put("filter_groups.enable", True)
        metric = take("algorithm.filter_groups.metric", "acc")
        put("filter_groups.metric", "accuracy" if metric == "acc" else "reward")
        put(
            "filter_groups.max_num_gen_batches",
            max(0, command.number("algorithm.filter_groups.max_num_gen_batches", 0)),
        )
        put("filter_groups.when_exhausted", "stop")
        put("filter_groups.prompts_per_round", command.number("data.gen_batch_size"))
    for buffer in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"):
        if take(f"{buffer}.enable", False):
            put("overlong_buffer.enable", True)
            put("overlong_buffer.len", take(f"{buffer}.len"))
            put("overlong_buffer.penalty_factor", take(f"{buffer}.penalty_factor", 1.0))
    put_router_replay(command, tree)
    put_correction(command, tree)


def put_router_replay(command: Command, tree: Tree) -> None:
    """The rollout's choices of experts, which verl's mode R3 replays."""
    keys = (f"{ACTOR}.megatron.router_replay.mode", f"{ACTOR}.router_replay.mode")
    mode = str(command.first(*keys, default="disabled"))
    if command.take(f"{ROLLOUT}.enable_rollout_routing_replay", mode == "R3") and mode == "R3":
        tree.put("algorithm.router_replay", "rollout")
    elif mode != "disabled":
        command.remark(
            f"{ACTOR}.router_replay.mode", "here is R3, the replay of the rollout's experts; none are replayed"
        )


def put_divergence(command: Command, tree: Tree) -> None:
    """The KL divergence from the reference, of the loss or else of the reward."""
    take, put = command.take, tree.put
    in_loss, in_reward = take(f"{ACTOR}.use_kl_loss", False), take("algorithm.use_kl_in_reward", False)
    if in_loss and in_reward:
        command.remark(
            "algorithm.use_kl_in_reward", "the divergence is a term of the loss or of the reward, here of the loss"
        )
    if in_loss:
        kind = str(take(f"{ACTOR}.kl_loss_type", "low_var_kl"))
        put("algorithm.kl_coef", take(f"{ACTOR}.kl_loss_coef", 0.001))
        put("algorithm.kl_placement", "loss")
        put("algorithm.kl_gradient", "k2" if kind.endswith("+") else None)
        key = f"{ACTOR}.kl_loss_type"
    elif in_reward:
        kind, key = str(take("algorithm.kl_penalty", "kl")), "algorithm.kl_penalty"
        put("algorithm.kl_coef", take("algorithm.kl_ctrl.kl_coef", 0.001))
        put("algorithm.kl_placement", "reward")
        if take("algorithm.kl_ctrl.type", "fixed") == "adaptive":
            put("algorithm.kl_controller.type", "adaptive")
            put("algorithm.kl_controller.target", take("algorithm.kl_ctrl.target_kl", 0.1))
            put("algorithm.kl_controller.horizon", take("algorithm.kl_ctrl.horizon", 10000))
    else:
        command.pass_over(f"{ACTOR}.kl_loss_", "algorithm.kl_penalty", "algorithm.kl_ctrl.")
        return
    if kind.removesuffix("+") not in ESTIMATORS:
        command.remark(key, f"here are {', '.join(ESTIMATORS)}")
    put("algorithm.kl_estimator", ESTIMATORS.get(kind.removesuffix("+")))


def put_correction(command: Command, tree: Tree) -> None:
    """Importance weights against the difference between rollout and trainer."""
    take, section = command.take, "algorithm.rollout_correction"

    def put(key: str, value: Any) -> None:
        tree.put(f"{section}.{key}", value)

    cap = command.number(f"{ACTOR}.tis_imp_ratio_cap")  # before verl 0.6
    level, limit = take(f"{section}.rollout_is", ""), command.number(f"{section}.rollout_is_threshold", 2.0)
    if cap and cap > 0:
        level, limit = "token", cap
    if level:
        put("type", "tis")
        put("level", level)
        put("threshold", limit)
    rejection, most = take(f"{section}.rollout_rs", ""), command.number(f"{section}.rollout_rs_threshold")
    least = command.number(f"{section}.rollout_rs_threshold_lower")
    most_or_limit = limit if most is None else most
    if rejection == "geometric":
        put("reject_threshold", most_or_limit)
        if least and most and abs(least * most - 1) > 1e-3:
            command.remark(f"{section}.rollout_rs_threshold_lower", "the lower bound is 1 / the upper")
    elif rejection in ("token", "sequence") and not level:
        command.remark(f"{section}.rollout_rs", "what is kept has its ratio as weight too")
        put("type", "mis")
        put("level", rejection)
        put("threshold", most_or_limit)
        put("threshold_low", least or 1 / (most or limit))
    elif rejection:
        command.remark(f"{section}.rollout_rs", "beside weights, responses are left out by the geometric mean alone")
    put("veto_threshold", take(f"{section}.rollout_token_veto_threshold"))
    if command.first(f"{section}.bypass_mode", f"{section}.bypass_old_logprob_for_rollout", default=False):
        tree.put("algorithm.old_logprobs", "rollout")


def put_roles(command: Command, tree: Tree) -> None:
    """Layouts, memory, token budgets and optimizers of the roles that the command has."""
    longest = tree["data"]["max_prompt_length"] + tree["rollout"]["max_response_length"]
    budget = put_role(command, tree, ACTOR, longest, 16384)
    logprobs = logprob_budget(command, ROLLOUT, longest)
    tree.put("actor.logprob_tokens_per_gpu", logprobs if logprobs != budget else None)
    put_optimizer(command, tree, ACTOR, 1e-6)
    put_adapters(command, tree)
    if tree["algorithm"].get("kl_coef") and "lora" not in tree["actor"]:
        put_role(command, tree, REFERENCE, longest, budget)
        tree["reference"]["tokens_per_gpu"] = logprob_budget(command, REFERENCE, longest) or budget
    else:
        command.pass_over(f"{REFERENCE}.")
    if tree["algorithm"].get("advantage") == "gae":
        put_role(command, tree, "critic", longest, 32768)
        put_optimizer(command, tree, "critic", 1e-5)
        tree.put("critic.path", command.take("critic.model.path", "") or None)
        tree.put("critic.value_clip", command.take("critic.cliprange_value", 0.5))
        # verl's actor learns from step critic_warmup on, ours after so many steps.
        tree.put("critic.warmup_steps", max(0, command.number("trainer.critic_warmup", 0) - 1))
    else:
        command.pass_over("critic.", "trainer.critic_warmup")
    if command.first("reward_model.enable", "reward.reward_model.enable", default=False):
        put_role(command, tree, "reward_model", longest, 32768)
        path = command.first("reward_model.model.path", "reward.reward_model.model_path", default="MISSING")
        tree.put("reward_model.path", path)
    of_actor = tree["actor"]
    for role in ("reference", "critic", "reward_model"):
        section = tree.get(role, {})
        if section.get("layout", {}) == of_actor.get("layout", {}):
            section.pop("layout", None)  # the actor's, unless it is another


def put_adapters(command: Command, tree: Tree) -> None:
    """Low-rank adapters of the actor, by the keys of FSDP or by those of Megatron; the reference is without them."""
    of_fsdp, of_megatron = command.number(f"{MODEL}.lora_rank", 0), command.number(f"{MODEL}.lora.rank", 0)
    path = command.first(f"{MODEL}.lora_adapter_path", f"{MODEL}.lora.adapter_path", default="")
    if not of_fsdp and not of_megatron:
        if path:
            command.remark(f"{MODEL}.lora_adapter_path", "all weights are trained; give its rank too, as lora_rank")
        command.pass_over(*(f"{MODEL}.{key}" for key in ("lora_alpha", "lora.", "target_modules", "exclude_modules")))
        return
    alpha = command.number(f"{MODEL}.lora_alpha", 16) if of_fsdp else command.number(f"{MODEL}.lora.alpha", 32)
    tree.put("actor.lora.rank", int(of_fsdp or of_megatron))
    tree.put("actor.lora.alpha", alpha)
    key = f"{MODEL}.target_modules" if of_fsdp else f"{MODEL}.lora.target_modules"
    asked = command.take(key, ["all-linear"])
    if asked not in ("all-linear", ["all-linear"]):
        listed = asked if isinstance(asked, list) else [asked]
        if not all(isinstance(name, str) for name in listed):
            raise RecipeError(f"{key}={asked}: must be names of layers, or all-linear")
        known = {name for names in LINEAR_LAYERS.values() for name in names}
        layers = [
            layer for name in filter(None, listed) for layer in LINEAR_LAYERS.get(name, [name] if name in known else [])
        ]
        tree.put("actor.lora.target_modules", layers if 0 < len(layers) < len(known) else None)
        others = [str(name) for name in listed if name not in known and name not in LINEAR_LAYERS]
        if others:
            command.remark(key, f"adapters are on {', '.join(sorted(known))} alone")
    if of_megatron:
        command.remark(
            f"{MODEL}.lora.rank", "queries, keys and values have an A each, and so have gate and up, and each expert"
        )
    for excluded in (f"{MODEL}.exclude_modules", f"{MODEL}.lora.exclude_modules"):
        if command.take(excluded):
            command.remark(excluded, "name the layers that are left in actor.lora.target_modules")
    if command.number(f"{MODEL}.lora.dropout", 0.0):
        command.remark(f"{MODEL}.lora.dropout", "adapters have no dropout")
    tree.put("actor.lora.path", path or None)
    command.pass_over(f"{MODEL}.lora.share_expert_adapters")
    command.pass_over(f"{MODEL}.lora.merge", f"{MODEL}.lora.type")  # always merged, and always what is called canonical


def put_role(command: Command, tree: Tree, role: str, longest: int, default: int) -> int:
    """Layout, memory and the token budget of a role; returns the budget."""
    ours, take = ROLES[role], command.take
    of_actor = tree.get("actor", {}).get("layout", {})
    for key, degree in DEGREES.items():
        inherited = of_actor.get(degree) if role == REFERENCE else None  # in verl, too, it follows the actor
        value = command.number(f"{role}.megatron.{key}", inherited)
        tree.put(f"{ours}.layout.{degree}", value if value not in (None, 1) or degree == "expert_tensor" else None)
    heads = command.number(f"{role}.ulysses_sequence_parallel_size", 1)
    if heads != 1:
        tree.put(f"{ours}.layout.context", heads)
        tree.put(f"{ours}.cp_comm_type", "a2a")
    tensor = tree.get(ours, {}).get("layout", {}).get("tensor", 1)
    tree.put(f"{ours}.sequence_parallel", take(f"{role}.megatron.sequence_parallel", True) and tensor > 1)
    # FSDP has no gradients between steps, so they leave with what is offloaded.
    for part, key, of_fsdp in (
        ("parameters", "param", "param"), ("gradients", "grad", "param"), ("optimizer", "optimizer", "optimizer")
    ):  # fmt: skip
        fsdp = [f"{prefix}.fsdp_config.{of_fsdp}_offload" for prefix in (role, f"{role}.model")]
        tree.put(f"{ours}.offload.{part}", command.first(f"{role}.megatron.{key}_offload", *fsdp))
    if role in (ACTOR, "critic"):
        put_recomputation(command, tree, role)
    rows, _, tokens, of_passes = (
        command.number(f"{role}.{name}_per_gpu")
        for name in ("ppo_micro_batch_size", "forward_micro_batch_size", "ppo_max_token_len", "forward_max_token_len")
    )
    rows, tokens = rows or command.number(f"{role}.micro_batch_size_per_gpu"), tokens or of_passes
    budget = int(tokens or (rows * longest if rows else max(default, longest)))
    tree.put(f"{ours}.tokens_per_gpu", budget)
    return budget


def put_recomputation(command: Command, tree: Tree, role: str) -> None:
    """Megatron's recomputation, or FSDP's gradient checkpointing, which is that of whole layers."""
    ours, options = ROLES[role], f"{role}.megatron.override_transformer_config"
    granularity = command.take(f"{options}.recompute_granularity")
    layers = command.take(f"{options}.recompute_num_layers")
    blocks = command.take(f"{options}.recompute_method") == "block"
    command.take(f"{options}.recompute_modules")
    model = MODEL if role == ACTOR else "critic.model"
    checkpointing = command.take(f"{model}.enable_gradient_checkpointing", not command.is_of_megatron)
    # Only FSDP reads the model's key.
    full = checkpointing and not command.is_of_megatron
    tree.put(f"{ours}.recompute.granularity", granularity or ("full" if full else None))
    tree.put(f"{ours}.recompute.layers", layers if granularity == "full" and blocks else None)


def logprob_budget(command: Command, role: str, longest: int) -> int | None:
    """Tokens of a pass without gradients, if the command says so."""
    rows, tokens = (
        command.number(f"{role}.log_prob_{name}") for name in ("micro_batch_size_per_gpu", "max_token_len_per_gpu")
    )
    return int(tokens) if tokens else int(rows * longest) if rows else None


def put_optimizer(command: Command, tree: Tree, role: str, learning_rate: float) -> None:
    """AdamW and its schedule. verl's schedule counts steps of the run, ours optimizer steps."""
    section, take = f"{role}.optim", command.take
    batch = tree["batch"]
    updates = batch["epochs_per_step"] * max(1, batch["prompts_per_step"] // batch["minibatch_prompts"])

    def put(key: str, value: Any) -> None:
        tree.put(f"{ROLES[role]}.optimizer.{key}", value)

    rate = command.number(f"{section}.lr", learning_rate)
    put("learning_rate", rate)
    warmup, ratio = command.number(f"{section}.lr_warmup_steps"), command.number(f"{section}.lr_warmup_steps_ratio")
    steps = int(warmup if warmup is not None and warmup >= 0 else (ratio or 0.0) * tree["steps"])
    put("warmup_steps", steps * updates)
    styles = (f"{section}.lr_decay_style", f"{section}.lr_scheduler_type", f"{section}.warmup_style")
    style = command.first(*styles, default="constant")
    if style not in ("constant", "linear", "cosine"):
        command.remarks.append(f"{role}.optim: a schedule {style} is not here, but constant, linear and cosine")
    elif style != "constant":
        decay = command.number(f"{section}.lr_decay_steps")
        put("schedule", style)
        put("decay_steps", decay and decay * updates)
        put(
            "min_learning_rate",
            command.first(f"{section}.min_lr", default=command.number(f"{section}.min_lr_ratio", 0) * rate),
        )
    put("weight_decay", take(f"{section}.weight_decay", 0.01))
    betas = take(f"{section}.betas", [0.9, 0.999])
    if not isinstance(betas, list) or len(betas) != 2:
        raise RecipeError(f"{section}.betas={betas}: must be two numbers, such as [0.9,0.999]")
    put("beta1", betas[0])
    put("beta2", betas[1])
    put("clip_grad", command.first(f"{section}.clip_grad", f"{role}.grad_clip", default=1.0))


def put_rewards(command: Command, tree: Tree) -> None:
    """The reward function, or the model that takes its place."""
    keys = ("custom_reward_function", "reward.custom_reward_function")
    path = command.first(*(f"{key}.path" for key in keys), default="")
    name = command.first(*(f"{key}.name" for key in keys), default="compute_score")
    if "reward_model" in tree:
        tree.put("reward.rule", "none")  # in verl a reward model's scores are the whole reward
    elif path:
        tree.put("reward.function", f"{path}:{name}")


def put_operations(command: Command, tree: Tree) -> None:
    """Evaluation, checkpoints and trackers."""
    take, put = command.take, tree.put
    every, save = command.number("trainer.test_freq", -1), command.number("trainer.save_freq", -1)
    put("evaluation.interval", max(0, every) if tree["data"]["validation_files"] else 0)
    temperature = command.number(f"{ROLLOUT}.val_kwargs.temperature", 0)
    put("evaluation.temperature", temperature if take(f"{ROLLOUT}.val_kwargs.do_sample", temperature > 0) else 0)
    put("checkpoint.save_interval", max(0, save))
    put("checkpoint.keep_last_k", take("trainer.max_actor_ckpt_to_keep"))
    if save > 0 and not take("trainer.max_actor_ckpt_to_keep"):
        command.remark("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last_k keeps 2, and verl all")
    put("run_root", take("trainer.default_local_dir"))
    loggers = take("trainer.logger", ["console", "wandb"])
    listed = [str(logger) for logger in (loggers if isinstance(loggers, list) else [loggers])]
    put("monitor.trackers", ["jsonl", *(name for name in ("tensorboard", "wandb", "mlflow") if name in listed)])
    others = sorted(set(listed) - {"console", "tensorboard", "wandb", "mlflow", "file"})
    if others:
        command.remark("trainer.logger", f"{', '.join(others)} cannot be written to")
    if take("trainer.resume_mode", "auto") != "auto":
        command.remark(
            "trainer.resume_mode", "is launch/train.py --resume here, and checkpoints of verl cannot be read"
        )
