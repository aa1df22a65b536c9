"""What the ranks of the parity tests run: a role in some layout computes, learns and is exported."""

from __future__ import annotations

import contextlib
import json
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from parallel.whole_batches import logprobs, update
from rlhf_megatron.compat import megatron
from rlhf_megatron.errors import CheckpointError

megatron.install()

from rlhf_megatron.algorithms.aggregation import token_weights  # noqa: E402
from rlhf_megatron.algorithms.kl import KLController  # noqa: E402
from rlhf_megatron.checkpoint.hugging_face import export_adapters, export_weights  # noqa: E402
from rlhf_megatron.checkpoint.role_state import restore_role, role_state, role_tensors  # noqa: E402
from rlhf_megatron.checkpoint.saved_role import files_of_role  # noqa: E402
from rlhf_megatron.checkpoint.storage import TensorFile, partial_folder, write_tensors  # noqa: E402
from rlhf_megatron.data.rollout_batch import batch_from_rows  # noqa: E402
from rlhf_megatron.data.row_numbers import SpreadRows, numbers_of  # noqa: E402
from rlhf_megatron.loops.sft import negative_log_likelihood  # noqa: E402
from rlhf_megatron.models.architecture import read_architecture  # noqa: E402
from rlhf_megatron.models.choice_shape import choice_shape  # noqa: E402
from rlhf_megatron.models.families import mixture  # noqa: E402
from rlhf_megatron.models.hf_export import Companions  # noqa: E402
from rlhf_megatron.models.hf_files import CheckpointFiles  # noqa: E402
from rlhf_megatron.models.lora import Adaptation  # noqa: E402
from rlhf_megatron.models.peft_files import PeftAdapter  # noqa: E402
from rlhf_megatron.recipe import ActorSection, OptimizerSection, RLRecipe, RoleSection, make_recipe  # noqa: E402
from rlhf_megatron.regather.shard_specs import adapter_shards  # noqa: E402
from rlhf_megatron.roles import streaming  # noqa: E402
from rlhf_megatron.roles.learning import Learners, share_rows, update_actor, with_advantages  # noqa: E402
from rlhf_megatron.roles.placed import PlacedRole  # noqa: E402
from rlhf_megatron.roles.role import Role  # noqa: E402
from rlhf_megatron.topology.layout import Layout  # noqa: E402

UNTRAINED = ", untrained"


def learn(
    model: str, layout: dict[str, int], rows: list[Any], steps: int, section: dict[str, Any], optimizer: dict[str, Any],
    dtype: str = "float32", exported: str | None = None, then: dict[str, int] | None = None,
    loss_scale: float | None = None, choices: list[Any] | None = None, shares_prompts: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return logits, logprobs and entropy of ``rows``, then ``steps`` updates and an export of the result.

    In float16 the first of them begins with ``loss_scale``. Outputs are by the experts of ``choices``, where given;
    updates choose their own. Without adapters there is an export before the updates too, beside ``exported``.

    With ``then``, the updates after the first are those of a role in that layout, which has the first one's state.
    """
    architecture, learning = read_architecture(model).for_rows(64), OptimizerSection(**optimizer)

    def make_role(of_layout: dict[str, int]) -> Role:
        return Role(
            "actor",
            architecture,
            Layout(**of_layout),
            range(dist.get_world_size()),
            ActorSection(**section, optimizer=learning),
            dtype=dtype,
            seed=1,
            optimizer=learning,
            training_steps=steps,
            replays_experts=choices is not None,
            shares_prompts=shares_prompts,
        )

    def load(role: Role) -> None:
        lora = ActorSection(**section, optimizer=learning).lora
        start = PeftAdapter(lora.path, architecture, Adaptation.of(lora)) if lora and lora.path else None
        with CheckpointFiles(model, architecture) as files:
            role.load(files, start)

    def export(of_role: Role, folder: str) -> None:
        companions, sources = Companions(Path(model)), of_role.shard_spec()
        parameters = of_role.parameters()
        export_weights(Path(folder), companions, architecture, sources, parameters, torch.float32, of_role.device)

    role = make_role(layout)
    load(role)
    if exported and not role.shard.adapters:
        export(role, f"{exported}{UNTRAINED}")
    if loss_scale is not None:
        assert role.trainer is not None and role.trainer.loss_scale is not None
        role.trainer.loss_scale.load([loss_scale, 0])
    batch = batch_from_rows(*rows)
    if choices is not None:
        shape = choice_shape(architecture)
        assert shape is not None
        given = [torch.tensor(of_row, dtype=shape.dtype) for of_row in choices]
        batch = batch_from_rows(*rows, expert_choices=given, choices=shape)
    outputs = logprobs(role, batch)
    batch = batch.with_fields(expert_choices=None)
    base = (
        logprobs(role, batch, "base_logprobs").logprobs[batch.response_mask].tolist() if role.shard.adapters else None
    )
    weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")
    updates = [update(role, batch, {"weights": weights}, negative_log_likelihood)]
    refused = ""
    if then is not None:
        before, role = role, make_role(then)
        if role.shard.adapters:
            load(role)  # a checkpoint has no weights without adapters
        refused = hand_over(before, role, Path(f"{model}, checkpoint"))
    updates += [update(role, batch, {"weights": weights}, negative_log_likelihood) for _ in range(1, steps)]
    if exported:
        export(role, exported)
        if role.shard.adapters:
            adaptation = role.shard.adapters.adaptation
            held = {name: parameter.data for name, parameter in role.shard.trainable.module.named_parameters()}
            sources = adapter_shards(architecture, adaptation, role.layout, role.ranks)
            export_adapters(Path(exported) / "adapter", model, architecture, adaptation, sources, held, role.device)
    return {
        "base_logprobs": base,
        "logprobs": outputs.logprobs[batch.response_mask].tolist(),
        "entropy": outputs.entropy[batch.response_mask].tolist(),
        "losses": [metrics["loss"] for metrics in updates],
        "grad_norms": [metrics["grad_norm"] for metrics in updates],
        "loss_scales": [metrics.get("loss_scale") for metrics in updates],
        "parallel_state_untouched": not _megatron_globals_exist(),
        "refused": refused,
        "shared_prompt_fractions": [metrics.get("shared_prompt_fraction") for metrics in updates],
    }


def hand_over(before: Role, after: Role, folder: Path) -> str:
    """Return the state of one role to another by files, as a checkpoint does; what was there is nothing but zeros.

    Returns what is said of a checkpoint that does not tell the order of attention's rows.
    """
    tensors, pieces = role_tensors(before, {})
    about = {"pieces": {before.name: pieces}}
    write_tensors(folder, f"rank-{dist.get_rank()}.safetensors", tensors, about)
    state = json.loads(json.dumps(role_state(before)))
    dist.barrier()
    for parameter in after.shard.trainable.module.parameters():
        parameter.data.zero_()
    with contextlib.ExitStack() as stack:
        paths = [partial_folder(folder) / f"rank-{position}.safetensors" for position in range(before.layout.size)]
        files = files_of_role(state, [stack.enter_context(TensorFile(path)) for path in paths])
        restore_role(after, state, files)
        after.merge_adapters()
        del state["rows_of_attention"]
        try:
            restore_role(after, state, files)
        except CheckpointError as error:
            return str(error)
    return ""


def _megatron_globals_exist() -> bool:
    from megatron.core import parallel_state

    return bool(parallel_state.model_parallel_is_initialized())


def run_cases(cases: dict[str, dict[str, Any]], go_on: bool = False) -> dict[str, dict[str, Any]]:
    """Run several cases on the ranks of one launch, since starting ranks takes longer than what they do.

    With ``go_on``, a case that fails on all ranks alike has the traceback as its result.
    """
    streaming.PIECE_BYTES = 2**16
    mixture.STACK_ELEMENTS = 2**14  # so that a layer's experts are several parameters
    functions = {"learn": learn, "learn_past_a_nan": learn_past_a_nan, "learn_from_groups": learn_from_groups}
    results: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        try:
            results[name] = functions[case["function"]](**case["arguments"])
        except Exception:
            if not go_on:
                raise
            results[name] = {"failed": traceback.format_exc()}
    return results


def learn_from_groups(
    model: str,
    rows: list[Any],
    rewards: list[list[float]],
    optimizer: dict[str, Any],
    shares_prompts: bool = False,
    **algorithm: Any,
) -> dict[str, Any]:
    """Take steps of GRPO's update on given responses in groups of three, with ``rewards`` [rows] for each step."""
    world = dist.get_world_size()
    recipe = make_recipe(
        {
            "name": "x",
            "loop": "rl",
            "steps": len(rewards),
            "model": {"path": model, "dtype": "float32"},
            "data": {"train_files": ["a"], "max_prompt_length": 9},
            "batch": {"prompts_per_step": len(rows[0]) // 3, "responses_per_prompt": 3, "minibatch_prompts": 2},
            "actor": {"tokens_per_gpu": 60, "optimizer": optimizer, "shared_prompts": shares_prompts},
            "rollout": {"max_response_length": 14},
            "algorithm": algorithm,
        },
        "here",
    )
    assert isinstance(recipe, RLRecipe)
    actor = PlacedRole(
        "actor",
        read_architecture(model),
        Layout(data=world),
        range(world),
        recipe.actor,
        "float32",
        seed=1,
        optimizer=recipe.actor.optimizer,
        training_steps=99,
        shares_prompts=shares_prompts,
    )
    with CheckpointFiles(model, actor.architecture) as files:
        actor.load(files)
    context: Any = SimpleNamespace(recipe=recipe, span=lambda _: contextlib.nullcontext())
    controller, metrics = KLController(recipe.algorithm), []
    for of_step in rewards:
        batch = batch_from_rows(*rows, group_id=[row // 3 for row in range(len(rows[0]))], rewards=of_step)
        batch = batch.with_fields(rollout_logprobs=logprobs(actor, batch).logprobs)
        holder = torch.arange(batch.rows) % world
        own = (holder == dist.get_rank()).nonzero().flatten().tolist()
        spread = SpreadRows(numbers_of(batch, holder), batch.select(own), dist.get_rank())
        lesson = share_rows(spread, recipe, Learners(actor, None, None))
        if recipe.old_logprobs == "recompute":
            lesson = lesson.with_batch(old_logprobs=lesson.batch.rollout_logprobs)
        lesson = with_advantages(lesson, recipe.algorithm, controller, actor)
        metrics.append(update_actor(context, actor, lesson, controller)[0])
    values = torch.cat([parameter.flatten() for parameter in actor.weights.parameters().values()])
    return {"parameters": values.tolist(), "metrics": metrics}


def learn_past_a_nan(model: str, rows: list[Any], dtype: str) -> dict[str, Any]:
    """Make one update whose loss is NaN on the last rank's rows alone, then an ordinary one: what each did to
    parameters."""
    architecture = read_architecture(model)
    world = dist.get_world_size()
    role = Role(
        "actor",
        architecture,
        Layout(data=world),
        range(world),
        RoleSection(tokens_per_gpu=60),
        dtype=dtype,
        seed=1,
        optimizer=OptimizerSection(learning_rate=1e-2),
        training_steps=2,
    )
    with CheckpointFiles(model, architecture) as files:
        role.load(files)
    batch = batch_from_rows(*rows)
    weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")

    def poisoned(logprobs: torch.Tensor, entropy: torch.Tensor, fields: dict[str, torch.Tensor]) -> Any:
        loss, metrics = negative_log_likelihood(logprobs, entropy, fields)
        return (loss * torch.nan if dist.get_rank() == world - 1 else loss), metrics

    results: dict[str, Any] = {}
    for name, objective in (("poisoned", poisoned), ("ordinary", negative_log_likelihood)):
        before = {key: value.clone() for key, value in role.parameters().items()}
        results[name] = update(role, batch, {"weights": weights}, objective)
        results[f"{name}_moved"] = any(not torch.equal(before[key], value) for key, value in role.parameters().items())
        results[f"{name}_finite"] = all(bool(torch.isfinite(value).all()) for value in role.parameters().values())
    return results
