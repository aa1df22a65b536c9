"""Translation of verl's keys of roles: layouts, memory, token budgets and adapters.

As of verl 0.9.1: verl/trainer/config/{actor,ref,critic,engine,model}/. Not here: optimizers (verl_optimizer.py), other
sections (verl_sections.py, verl_algorithm.py), and what a recipe may hold (rlhf_megatron/recipe/).
"""

from __future__ import annotations

import math
from typing import Any

from verl_command import ACTOR, DTYPES, MODEL, REFERENCE, ROLES, ROLLOUT, Command, Tree
from verl_optimizer import put_optimizer, put_overlap, put_remainders

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.recipe.memory_savings import KEPT_MODULES
from rlhf_megatron.untrusted import shown

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
# Keys of a role's micro-batches, in rows and in tokens. The reference's are those of passes without gradients.
BUDGETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    ACTOR: (("ppo_micro_batch_size",), ("ppo_max_token_len",)), REFERENCE: ((), ()),
    "critic": (("ppo_micro_batch_size", "forward_micro_batch_size"), ("ppo_max_token_len", "forward_max_token_len")),
    "reward_model": (("micro_batch_size",), ("forward_max_token_len",)),
}  # fmt: skip
REWARD_FUNCTIONS = ("custom_reward_function", "reward.custom_reward_function")
JUDGES = ("reward_model", "reward.reward_model")
# Keys of a judge's rollout, ours, and verl's defaults.
JUDGE_KEYS: tuple[tuple[str, str, Any], ...] = (
    ("tensor_model_parallel_size", "layout.tensor", 2), ("prompt_length", "max_prompt_length", 2048),
    ("response_length", "max_response_length", 2048), ("temperature", "temperature", 1.0),
    ("max_num_seqs", "max_num_seqs", 1024), ("enforce_eager", "enforce_eager", True),
)  # fmt: skip
JUDGE_PROMPT = (
    "Question: {question}\n\nAnswer: {response}\n\nReference answer: {ground_truth}\n\n"
    "How good is the answer, from 0 to 10? End with: Score: N"
)
OTHER_ADAPTERS = "is of verl's other engine, and with this one it trains all weights; here adapters"
# Engines of verl beside Megatron, by their sections.
ENGINES = ("fsdp_config", "fsdp", "model.fsdp_config", "veomni")


def put_roles(command: Command, tree: Tree) -> None:
    """Put layouts, memory, token budgets and optimizers of the roles that the command has."""
    longest = tree["data"]["max_prompt_length"] + tree["rollout"]["max_response_length"]
    budget = put_role(command, tree, ACTOR, longest, 16384)
    logprobs = logprob_budget(command, ROLLOUT, longest)
    tree.put("actor.logprob_tokens_per_gpu", logprobs if logprobs != budget else None)
    put_optimizer(command, tree, ACTOR, 1e-6)
    put_adapters(command, tree)
    put_fp8(command, tree)
    put_overlap(command, tree, ACTOR)
    put_remainders(command, tree, ACTOR)
    if tree["algorithm"].get("kl_coef") and "lora" not in tree["actor"]:
        put_role(command, tree, REFERENCE, longest, budget)
        tree["reference"]["tokens_per_gpu"] = logprob_budget(command, REFERENCE, longest) or budget
    else:
        command.pass_over(f"{REFERENCE}.")
    if tree["algorithm"].get("advantage") == "gae":
        put_role(command, tree, "critic", longest, 32768)
        put_optimizer(command, tree, "critic", 1e-5)
        put_overlap(command, tree, "critic")
        put_remainders(command, tree, "critic")
        tree.put("critic.path", command.take("critic.model.path", "") or None)
        tree.put("critic.value_clip", command.take("critic.cliprange_value", 0.5))
        check_critic(command, tree)
        # verl's actor learns from step critic_warmup on, ours after so many steps.
        tree.put("critic.warmup_steps", max(0, command.number("trainer.critic_warmup", 0) - 1))
    else:
        command.pass_over("critic.", "trainer.critic_warmup")
    if command.first("reward_model.enable", "reward.reward_model.enable", default=False):
        put_reward_model(command, tree, longest)
    of_actor = tree["actor"]
    for role in ("reference", "critic", "reward_model"):
        section = tree.get(role, {})
        if section.get("layout", {}) == of_actor.get("layout", {}):
            section.pop("layout", None)  # the actor's, unless it is another


def put_reward_model(command: Command, tree: Tree, longest: int) -> None:
    """Put a classifier; or a judge, which verl tells apart by the function that asks it."""
    path = command.first("reward_model.model.path", "reward.reward_model.model_path", default="")
    if not path:
        raise RecipeError("reward.reward_model.model_path: name the reward model's folder")
    if command.first(*(f"{key}.path" for key in REWARD_FUNCTIONS), default=""):
        put_judge(command, tree, path)
    else:
        put_role(command, tree, "reward_model", longest, 32768)
        tree.put("reward_model.path", path)
        for key in (f"{section}.rollout.temperature" for section in JUDGES):
            if command.number(key, 1.0) not in (0, 1):
                command.refuse(key, "a reward model is a classifier with one score")


def put_judge(command: Command, tree: Tree, path: str) -> None:
    """Put a generative reward model: its engines' settings; what it is asked stands in a function, and so not here."""
    tree["judge"] = Tree(path=path, prompt=JUDGE_PROMPT, score_range=[0, 10])
    for key, ours, default in JUDGE_KEYS:
        value = command.first(*(f"{section}.rollout.{key}" for section in JUDGES), default=default)
        tree.put(f"judge.{ours}", value)


def check_critic(command: Command, tree: Tree) -> None:
    """Tell of what a critic has in common with the actor here, and not in the command."""
    batch = tree["batch"]
    for key, ours in (("ppo_mini_batch_size", batch["minibatch_prompts"]), ("ppo_epochs", batch["epochs_per_step"])):
        if command.number(f"critic.{key}", ours) != ours:
            command.refuse(f"critic.{key}", "minibatches and epochs are the actor's")
    mode = command.take(f"{ACTOR}.loss_agg_mode", "token-mean")
    if command.take("critic.loss_agg_mode", mode) != mode:
        command.refuse("critic.loss_agg_mode", "losses are averaged as the actor's")
    for key in ("critic.model.lora_rank", "critic.model.lora.rank"):
        if command.number(key, 0):
            command.refuse(key, "adapters are the actor's alone")


def put_adapters(command: Command, tree: Tree) -> None:
    """Put low-rank adapters of the actor, by the keys of FSDP or by those of Megatron; the reference is without
    them."""
    of_fsdp, of_megatron = command.number(f"{MODEL}.lora_rank", 0), command.number(f"{MODEL}.lora.rank", 0)
    path = command.first(f"{MODEL}.lora_adapter_path", f"{MODEL}.lora.adapter_path", default="")
    if not of_fsdp and not of_megatron:
        if path:
            command.refuse(f"{MODEL}.lora_adapter_path", "all weights are trained; give its rank too, as lora_rank")
        command.pass_over(*(f"{MODEL}.{key}" for key in ("lora_alpha", "lora.", "target_modules", "exclude_modules")))
        return
    if not (of_megatron if command.is_of_megatron else of_fsdp):
        command.remark(f"{MODEL}.{'lora.rank' if of_megatron else 'lora_rank'}", OTHER_ADAPTERS)
    if command.is_of_megatron and of_megatron:
        of_fsdp = 0  # only Megatron's key is read
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
            command.refuse(key, f"adapters are on {', '.join(sorted(known))} alone")
    if of_megatron and not of_fsdp:
        command.remark(
            f"{MODEL}.lora.rank", "queries, keys and values have an A each, and so have gate and up, and each expert"
        )
    for excluded in (f"{MODEL}.exclude_modules", f"{MODEL}.lora.exclude_modules"):
        if command.take(excluded):
            command.refuse(excluded, "name the layers that are left in actor.lora.target_modules")
    if command.number(f"{MODEL}.lora.dropout", 0.0):
        command.refuse(f"{MODEL}.lora.dropout", "adapters have no dropout")
    tree.put("actor.lora.path", path or None)


def put_role(command: Command, tree: Tree, role: str, longest: int, default: int) -> int:
    """Put layout, memory and the token budget of a role; return the budget."""
    ours = ROLES[role]
    (put_megatron_layout if command.is_of_megatron else put_sharded_layout)(command, tree, role)
    tensor = tree.get(ours, {}).get("layout", {}).get("tensor", 1)
    tree.put(f"{ours}.sequence_parallel", command.take(f"{role}.megatron.sequence_parallel", True) and tensor > 1)
    put_offload(command, tree, role)
    put_dtype(command, tree, role)
    if role in (ACTOR, "critic"):
        put_recomputation(command, tree, role)
    rows, tokens = (command.first(*(f"{role}.{key}_per_gpu" for key in keys)) for keys in BUDGETS[role])
    is_dynamic = role != REFERENCE and command.take(f"{role}.use_dynamic_bsz", False)
    budget = int(_tokens(is_dynamic, tokens, rows, longest) or max(default, longest))
    tree.put(f"{ours}.tokens_per_gpu", budget)
    return budget


def put_dtype(command: Command, tree: Tree, role: str) -> None:
    """Put the type of the reference, the actor's where none is given, and of the critic, in verl bfloat16."""
    if role not in (REFERENCE, "critic"):
        return
    of_actor = tree["model"]["dtype"]
    default = "bfloat16" if role == "critic" else of_actor
    own = command.choose(f"{role}.{'megatron' if command.is_of_megatron else 'fsdp_config'}.dtype", default, DTYPES)
    tree.put(f"{ROLES[role]}.dtype", own if own != of_actor else None)


def _tokens(is_dynamic: bool, tokens: Any, rows: Any, longest: int) -> int | None:
    """Return tokens of a micro-batch: those that it may have, or so many of the longest rows, by what verl reads.

    Raises RecipeError for what are no numbers above 0.
    """
    for count in (tokens, rows):
        if count is not None and (
            isinstance(count, bool) or not isinstance(count, int | float) or not 0 < count < math.inf
        ):
            raise RecipeError(f"{shown(count)} tokens or rows of a micro-batch: must be a number above 0, and finite")
    of_rows = rows * longest if rows else None
    chosen = (tokens or of_rows) if is_dynamic else (of_rows or tokens)
    return int(chosen) if chosen else None


def put_megatron_layout(command: Command, tree: Tree, role: str) -> None:
    """Put degrees of parallelism; the reference follows the actor, in verl too."""
    section, of_actor = f"{ROLES[role]}.layout", tree.get("actor", {}).get("layout", {})
    for key, degree in DEGREES.items():
        inherited = of_actor.get(degree) if role == REFERENCE else None
        value = command.number(f"{role}.megatron.{key}", inherited)
        tree.put(f"{section}.{degree}", value if value not in (None, 1) or degree == "expert_tensor" else None)
    options = f"{role}.megatron.override_transformer_config"
    context = command.number(f"{options}.context_parallel_size")
    tree.put(f"{section}.context", context if context and context > 1 else None)
    for edge in ("first", "last"):
        inherited = of_actor.get(f"{edge}_stage_layers") if role == REFERENCE else None
        layers = command.number(f"{options}.num_layers_in_{edge}_pipeline_stage", inherited)
        is_cut = tree.get(ROLES[role], {}).get("layout", {}).get("pipeline", 1) > 1
        tree.put(f"{section}.{edge}_stage_layers", layers if is_cut else None)


def put_fp8(command: Command, tree: Tree) -> None:
    """Put the actor's training in 8 bits, scaled by blocks."""
    options = f"{ACTOR}.megatron.override_transformer_config"
    form, scaling = command.take(f"{options}.fp8"), command.take(f"{options}.fp8_recipe")
    of_optimizer = f"{ACTOR}.optim.override_optimizer_config.fp8_recipe"
    if command.take(of_optimizer) not in (None, scaling):
        command.refuse(of_optimizer, "training in 8 bits is scaled as fp8_recipe of the layers says")
    if not form:
        return
    if scaling != "blockwise":
        command.refuse(f"{options}.fp8", "training in 8 bits is scaled by blocks here (fp8_recipe=blockwise)")
        return
    tree.put("actor.fp8", scaling)
    if form != "e4m3":
        command.remark(f"{options}.fp8", "gradients are e4m3 too")


def put_sharded_layout(command: Command, tree: Tree, role: str) -> None:
    """Put sequences cut by heads, and whole experts spread, as FSDP and its kin have them."""
    ours, turbo = ROLES[role], f"{role}.fsdp_config.turbo_config.distributed"
    keys = [f"{role}.{engine}.ulysses_sequence_parallel_size" for engine in ENGINES]
    heads = [f"{role}.ulysses_sequence_parallel_size", *keys, f"{role}.veomni.ulysses_parallel_size"]
    context = max(command.count(key, 1) for key in (*heads, f"{turbo}.ulysses_parallel_size"))
    if context > 1:
        tree.put(f"{ours}.layout.context", context)
        tree.put(f"{ours}.cp_comm_type", "a2a")
    expert = max(command.count(f"{key}.expert_parallel_size", 1) for key in (f"{role}.veomni", turbo))
    if expert > 1:
        tree.put(f"{ours}.layout.expert", expert)
        tree.put(f"{ours}.layout.expert_tensor", 1)


def put_offload(command: Command, tree: Tree, role: str) -> None:
    """Put the parts that leave the GPU between phases. Gradients leave with the weights: FSDP has none then, and
    Megatron releases them from verl 0.9.1 on, which has no key for them."""
    for part, name in (("parameters", "param"), ("gradients", "param"), ("optimizer", "optimizer")):
        keys = [f"{role}.{engine}.{name}_offload" for engine in ENGINES]
        if command.is_of_megatron:
            of_gradients = [f"{role}.megatron.grad_offload"] if part == "gradients" else []
            keys = [*of_gradients, f"{role}.megatron.{name}_offload"]
        tree.put(f"{ROLES[role]}.offload.{part}", command.first(*keys))


def put_recomputation(command: Command, tree: Tree, role: str) -> None:
    """Put Megatron's recomputation, or FSDP's gradient checkpointing, which is that of whole layers."""
    ours, options = ROLES[role], f"{role}.megatron.override_transformer_config"
    granularity = command.take(f"{options}.recompute_granularity")
    layers = command.take(f"{options}.recompute_num_layers")
    blocks = command.take(f"{options}.recompute_method") == "block"
    modules = _recomputed_modules(command, f"{options}.recompute_modules")
    model = MODEL if role == ACTOR else "critic.model"
    checkpointing = command.take(f"{model}.enable_gradient_checkpointing", not command.is_of_megatron)
    # Only FSDP reads the model's key.
    full = checkpointing and not command.is_of_megatron
    tree.put(f"{ours}.recompute.granularity", granularity or ("full" if full else None))
    tree.put(f"{ours}.recompute.layers", layers if granularity == "full" and blocks else None)
    tree.put(f"{ours}.recompute.modules", modules if granularity == "selective" else None)


def _recomputed_modules(command: Command, key: str) -> Any:
    """Return modules of selective recomputation, without those that are kept here; None where none are left."""
    modules = command.take(key)
    kept = [name for name in modules if name in KEPT_MODULES] if isinstance(modules, list) else []
    if kept:
        command.remark(key, f"{', '.join(kept)}: not recomputed but kept")
        modules = [name for name in modules if name not in kept]
    return modules or None


def logprob_budget(command: Command, role: str, longest: int) -> int | None:
    """Return tokens of a pass without gradients, if the command says so."""
    is_dynamic = command.take(f"{role}.log_prob_use_dynamic_bsz", command.take(f"{ACTOR}.use_dynamic_bsz", False))
    rows, tokens = (
        command.number(f"{role}.log_prob_{name}") for name in ("micro_batch_size_per_gpu", "max_token_len_per_gpu")
    )
    return _tokens(is_dynamic, tokens, rows, longest)


def put_placement(command: Command, tree: Tree) -> int:
    """Return the GPUs of roles and rollout; return their number. verl's trainers with rollouts ahead have GPUs for
    each."""
    nodes, per_node = command.count("trainer.nnodes", 1), command.count("trainer.n_gpus_per_node", 8)
    tree.put("cluster.gpus_per_node", per_node)
    training = nodes * per_node
    if "rollout.nnodes" not in command.given:
        return int(training)
    ahead = command.count("rollout.nnodes", 1) * command.count("rollout.n_gpus_per_node", 8)
    world = training + ahead
    tree.put("cluster.gpus_per_node", _gpus_of_a_node(world, per_node, command.count("rollout.n_gpus_per_node", 8)))
    for role in (role for role in ROLES.values() if role in tree):
        tree.put(f"{role}.ranks", f"0-{training - 1}" if training > 1 else "0")
    tree.put("rollout.ranks", f"{training}-{world - 1}" if ahead > 1 else str(training))
    tree.put("rollout.steps_ahead", 1)
    if command.take("async_training.partial_rollout", False):
        tree.put("rollout.partial", "resume")
        tree.put("rollout.max_staleness", 2)
    tree["rollout"].pop("sleep", None)
    algorithm = tree["algorithm"]
    if "rollout_correction" not in algorithm and "old_logprobs" not in algorithm:
        algorithm["old_logprobs"] = "rollout"
        command.refuse("algorithm.rollout_correction.bypass_mode", "one step ahead it is old_logprobs: rollout")
    return int(world)


def _gpus_of_a_node(world: int, training: int, ahead: int) -> int:
    """Return GPUs of a node, of which roles and rollout have one each, or share one."""
    shared = training + ahead
    return int(training if training == ahead else shared if world % shared == 0 else max(training, ahead))
