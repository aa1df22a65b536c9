"""Translation of verl's keys of optimizers: AdamW, its schedule by each of verl's engines, and its overlap.

As of verl 0.9.1: verl/trainer/config/optim/, and ``_build_lr_scheduler`` of verl/workers/engine/. Not here: the rest of
a role (verl_roles.py).
"""

from __future__ import annotations

from typing import Any

from verl_command import ROLES, Command, Tree

from rlhf_megatron.errors import RecipeError


def put_optimizer(command: Command, tree: Tree, role: str, learning_rate: float) -> None:
    """Put AdamW and its schedule. verl's schedule counts steps of the run, ours optimizer steps."""
    section, take = f"{role}.optim", command.take
    updates = _updates_of_schedule(command, tree)

    def put(key: str, value: Any) -> None:
        tree.put(f"{ROLES[role]}.optimizer.{key}", value)

    rate = command.number(f"{section}.lr", learning_rate)
    put("learning_rate", rate)
    steps = int(warmup_of(command, section, tree["steps"]))
    put("warmup_steps", steps * updates)
    style, floor = schedule_of(command, section, rate)
    if style not in ("constant", "linear", "cosine"):
        command.refusals.append(f"{role}.optim: a schedule {style} is not here, but constant, linear and cosine")
    elif style != "constant":
        decay = command.number(f"{section}.lr_decay_steps", tree["steps"] if command.is_stream else None)
        put("schedule", style)
        put("decay_steps", decay and decay * updates)
        put("min_learning_rate", floor)
    put("weight_decay", take(f"{section}.weight_decay", 0.01))
    put("epsilon", command.number(f"{section}.eps"))
    betas = take(f"{section}.betas", [0.9, 0.999])
    if not isinstance(betas, list) or len(betas) != 2:
        raise RecipeError(f"{section}.betas={betas}: must be two numbers, such as [0.9,0.999]")
    put("beta1", betas[0])
    put("beta2", betas[1])
    put("clip_grad", clip_of(command, role))
    moments = {key: take(f"{section}.{key}") for key in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    if set(moments.values()) <= {"bf16", "bfloat16"}:
        put("state_dtype", "bfloat16")
    else:
        for key, value in moments.items():
            if value not in (None, "fp32", "float32"):
                command.refuse(f"{section}.{key}", "both moments are of one type, float32 or bfloat16")
    put_streaming(command, tree, role)


def warmup_of(command: Command, section: str, steps: int) -> float:
    """Return steps of verl's schedule that it warms up: a share of all counts where no number above 0 is given, and in
    VeOmni always."""
    count, share = command.number(f"{section}.lr_warmup_steps"), command.number(f"{section}.lr_warmup_steps_ratio")
    is_given = count is not None and count > 0
    if is_given and command.engine == "veomni":
        command.remark(f"{section}.lr_warmup_steps", "VeOmni's schedules read lr_warmup_steps_ratio alone, as is done")
    elif is_given:
        return float(count)
    horizon = command.number(f"{section}.lr_decay_steps") if command.is_of_megatron else None
    return float((share or 0.0) * (horizon or steps))


def schedule_of(command: Command, section: str, rate: float) -> tuple[Any, Any]:
    """Return verl's (schedule, lowest rate), by the keys and defaults of its engine.

    FSDP's and Megatron's are constant where nothing is said; VeOmni's falls by a cosine, TorchTitan's linearly.
    """
    floor, factor = command.number(f"{section}.lr_min", 0.0), command.number(f"{section}.min_lr_factor", 0.0)
    for key, engine in (("lr_min", "veomni"), ("min_lr_factor", "torchtitan"), ("decay_type", "torchtitan")):
        if command.take(f"{section}.{key}") not in (None, 0, "linear") and command.engine != engine:
            command.refuse(f"{section}.{key}", f"is read with model_engine={engine} alone")
    if command.engine == "torchtitan":
        return ("constant" if factor == 1 else command.take(f"{section}.decay_type", "linear")), factor * rate
    if command.engine == "veomni":
        return command.take(f"{section}.lr_scheduler_type", "cosine"), floor
    # FSDP's older warmup_style goes before lr_scheduler_type.
    styles = (f"{section}.lr_decay_style", f"{section}.warmup_style", f"{section}.lr_scheduler_type")
    share = command.number(f"{section}.min_lr_ratio", 0)
    return command.first(*styles, default="constant"), command.first(f"{section}.min_lr", default=share * rate)


def clip_of(command: Command, role: str) -> Any:
    """Return the norm that gradients are clipped to, by the key of verl 0.8, or else by that before it."""
    chosen, older = (command.first(key) for key in (f"{role}.optim.clip_grad", f"{role}.grad_clip"))
    taken = next((norm for norm in (chosen, older) if norm is not None), 1.0)
    if older not in (None, chosen, 1.0):
        command.remark(f"{role}.grad_clip", f"verl from 0.8 on reads optim.clip_grad alone; {taken:g} is taken")
    return taken


def _updates_of_schedule(command: Command, tree: Tree) -> int:
    """Return optimizer steps of a step of verl's schedules: of a step of the run, and in streams of each batch of
    it."""
    batch = tree["batch"]
    minibatches = max(1, batch["prompts_per_step"] // batch["minibatch_prompts"])
    if command.is_stream:
        minibatches = command.count("async_training.require_batches", 1)
    return int(batch["epochs_per_step"] * minibatches)


def put_streaming(command: Command, tree: Tree, role: str) -> None:
    """Put the share of optimizer state that Megatron keeps in host memory."""
    options = f"{role}.optim.override_optimizer_config"
    share = command.first(f"{options}.optimizer_offload_fraction", f"{options}.offload_fraction", default=1.0)
    if command.first(f"{options}.optimizer_cpu_offload", default=False) and share > 0:
        tree.put(f"{ROLES[role]}.offload.streamed_optimizer", share)


def put_remainders(command: Command, tree: Tree, role: str) -> None:
    """Put master weights that are remainders beside weights in bfloat16, as Megatron's precision-aware optimizer has
    them; adapters have none."""
    name, section = "use_precision_aware_optimizer", tree[ROLES[role]]
    is_aware = command.first(f"{role}.optim.override_optimizer_config.{name}", f"{role}.optim.{name}", default=False)
    has_any = section.get("dtype", tree["model"]["dtype"]) == "bfloat16" and "lora" not in section
    tree.put(f"{ROLES[role]}.optimizer.master_remainders", (is_aware and command.is_of_megatron and has_any) or None)


def put_overlap(command: Command, tree: Tree, role: str) -> None:
    """Put gradients and weights that travel while passes compute; weights do only beside gradients, adapters never."""
    options = f"{role}.megatron.override_ddp_config"
    reduces, gathers = (command.take(f"{options}.overlap_{what}", False) for what in ("grad_reduce", "param_gather"))
    gathered = gathers and reduces and "lora" not in tree[ROLES[role]]
    tree.put(f"{ROLES[role]}.optimizer.overlap_grad_reduce", reduces or None)
    tree.put(f"{ROLES[role]}.optimizer.overlap_param_gather", gathered or None)
