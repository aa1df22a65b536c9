"""The text of ``--dry-run``: what a recipe would do on a world of any size. Needs neither torch nor a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rlhf_megatron.models.architecture import Architecture, config_notes, read_architecture, read_config
from rlhf_megatron.models.lora import Adaptation, adaptation_in
from rlhf_megatron.planning.feasibility import check_architectures
from rlhf_megatron.planning.memory import TIGHT, Estimate, RolloutMemory, estimate
from rlhf_megatron.planning.model_folders import planning_folder, role_architectures
from rlhf_megatron.planning.parameters import active_parameters, adapter_parameters, model_parameters
from rlhf_megatron.planning.row_lengths import lengths
from rlhf_megatron.planning.stage_memory import GB, StageMemory, all_logits, keeps_logits, micro_batch_tokens
from rlhf_megatron.planning.token_budgets import planned_budgets
from rlhf_megatron.recipe.drafting import DRAFT
from rlhf_megatron.recipe.judge import JudgeSection
from rlhf_megatron.recipe.load import resolved_yaml
from rlhf_megatron.recipe.recipe import Recipe
from rlhf_megatron.recipe.rl_recipe import RLRecipe
from rlhf_megatron.recipe.role_sections import RoleSection
from rlhf_megatron.recipe.rollout import RolloutSection
from rlhf_megatron.recipe.speculative import SpeculativeSection
from rlhf_megatron.recipe.world_checks import check_world, judge_ranks, layout_of, role_ranks, rollout_ranks
from rlhf_megatron.redaction import redact
from rlhf_megatron.rollout.drafts import MOST_HISTORY_TOKENS
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.role_layout import make_layout

_LARGE_LOGITS_GB = 0.5  # from where on making them once is worth a key


def dry_run(
    recipe: Recipe,
    world_size: int,
    regathering: Sequence[str] = (),
    times: Sequence[str] = (),
    start: Sequence[str] = (),
    between_hosts: Sequence[str] = (),
) -> str:
    """Return the plan of ``recipe`` on ``world_size`` GPUs as plain text: recipe, layouts, batch, memory, what cannot
    be done.

    ``regathering`` are lines about the bytes of a regathering, ``times`` about the time of a step, ``start`` about
    that before the first one and ``between_hosts`` about what hosts send each other, from a caller that can estimate
    them. Raises RecipeError where a layout
    does not fit the world or the model, or where there is no config.json to plan with, and ModelError where one cannot
    be read.
    """
    folder = planning_folder(recipe)
    model, notes = read_architecture(folder), config_notes(read_config(folder))
    architectures = role_architectures(recipe, model)
    check_world(recipe, world_size)
    check_architectures(recipe, architectures)
    text = resolved_yaml(recipe, redact)
    recipe = planned_budgets(recipe, architectures, world_size)
    memory = estimate(recipe, architectures, world_size)
    memory_lines = list(_memory_lines(recipe, memory, architectures["actor"]))
    sections = [
        ("Recipe", text.rstrip().splitlines()),
        ("Model", [_model_line(recipe, model), *model.notes(recipe.predicts), *notes, *_adapter_lines(recipe, model)]),
        ("Layouts", list(_layout_lines(recipe, architectures, world_size))),
        ("One step", list(_batch_lines(recipe, world_size, memory))),
        ("Regathering", regathering),
        ("Between hosts in one step (estimate, MB of 2^20 bytes that all hosts send)", between_hosts),
        ("Time of one step (estimate, without reward functions)", times),
        ("Memory of the fullest GPU (estimate, GB of 2^30 bytes)", memory_lines),
        ("Time from start to first step (estimate)", start),
    ]
    blocks = ["\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections if lines]
    return f"Plan of {recipe.name} on {world_size} GPUs\n\n" + "\n\n".join(blocks) + "\n"


def _model_line(recipe: Recipe, model: Architecture) -> str:
    mixture, parameters = "", model_parameters(model)
    if model.experts:
        chosen = f"{model.experts.chosen} work on a token ({active_parameters(model) / 1e9:.2f}B parameters)"
        mixture = f", {model.experts.count} experts of which {chosen}"
    full = model.full_heads
    others = f" ({full.key_value_heads} of {full.head_dim} numbers in layers without a window)" if full else ""
    return (
        f"{parameters:,} parameters ({parameters / 1e9:.2f}B) in {recipe.model.dtype}: "
        f"{model.layers} layers of {model.hidden}, {model.heads} heads, {model.key_value_heads} key-value heads{others}"
        f", vocabulary {model.vocabulary}{mixture}"
    )


def _adapter_lines(recipe: Recipe, model: Architecture) -> Iterator[str]:
    lora = recipe.actor.lora
    if lora is not None:
        trainable = adapter_parameters(model, lora)
        share = trainable / model_parameters(model)
        yield (
            f"{trainable:,} parameters of adapters learn, {share:.2%} of these: rank {lora.rank} on "
            f"{', '.join(adaptation_in(model, Adaptation.of(lora)).modules)}"
        )


def _layout_lines(recipe: Recipe, architectures: Mapping[str, Architecture], world_size: int) -> Iterator[str]:
    for name, section in recipe.roles.items():
        if name not in recipe.roles_made:
            yield f"{name}: not made, since algorithm.kl_coef is 0"
            continue
        layout = make_layout(layout_of(recipe, section), len(role_ranks(recipe, name, world_size)))
        yield from _role_lines(name, section, layout, architectures[name])
    if recipe.reference_is_base:
        yield "reference: the actor without its adapters"
    if isinstance(recipe, RLRecipe):
        tensor = recipe.rollout.layout.tensor
        ranks = rollout_ranks(recipe, world_size)
        whole = ", experts whole" if recipe.rollout.layout.expert_parallel else ""
        given = "" if recipe.rollout.ranks == "all" else f"{recipe.rollout.ranks} (counted from 0 below)"
        groups, replicas = _groups(tensor, 1, len(ranks)), _count(len(ranks) // tensor, "replica")
        yield f"rollout: {replicas} of tensor {tensor}{whole}, on ranks {given or groups}"
        if given:
            yield f"  replicas: {groups}"
        if recipe.rollout.steps_ahead:
            yield "  each batch is generated while the previous one is trained on"
        if recipe.judge:
            yield _judge_line(recipe, recipe.judge, world_size)


def _judge_line(recipe: RLRecipe, section: JudgeSection, world_size: int) -> str:
    tensor, ranks = section.layout.tensor, judge_ranks(recipe, section, world_size)
    where = f"{section.ranks} (counted from 0 below)" if section.ranks else "the rollout's ranks"
    return f"judge: {_count(len(ranks) // tensor, 'replica')} of tensor {tensor}, on {where}"


def _role_lines(name: str, section: RoleSection, layout: Layout, model: Architecture) -> Iterator[str]:
    world, stage_size = layout.size, layout.size // layout.pipeline
    degrees = {"tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context, "data": layout.data}
    shown = " x ".join(f"{key} {value}" for key, value in degrees.items() if value > 1 or key in ("tensor", "data"))
    cut = section.sequence_parallel or model.cuts_sequences
    extras = ", sequence parallel" if cut and layout.tensor > 1 else ""
    if name == DRAFT:  # whose groups are the actor's
        yield f"{name}: {shown} on the actor's last stage{extras}"
        return
    where = _span(0, world) if section.ranks == "all" else f"{section.ranks} (counted from 0 below)"
    yield f"{name}: {shown} on ranks {where}{extras}"
    # Ranks are numbered tensor first, then context, data, pipeline, which is the order of topology.Layout.
    if layout.tensor > 1:
        yield f"  tensor groups: {_groups(layout.tensor, 1, world)}"
    if layout.context > 1:
        yield f"  context groups: {_groups(layout.tensor * layout.context, layout.tensor, world)}"
    if model.experts:
        held, parts = model.experts.count // layout.expert, layout.expert_parts
        yield f"  experts: {held} on each GPU" + ("" if parts == 1 else f", 1/{parts} of each")
    if layout.expert > 1:
        yield f"  expert groups: {_groups(layout.expert * layout.expert_parts, layout.expert_parts, world)}"
    if layout.pipeline > 1:
        for stage, chunks in enumerate(layout.stage_chunks(model.layers)):
            layers = ", ".join(_span(chunk.start, chunk.stop) for chunk in chunks)
            yield f"  stage {stage}: layers {layers} on ranks {_span(stage * stage_size, (stage + 1) * stage_size)}"
    if layout.data > 1:
        yield f"  data groups: {_groups(stage_size, layout.tensor * layout.context, world)}"


def _span(start: int, stop: int) -> str:
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"


def _groups(size: int, stride: int, world: int) -> str:
    """Return the groups of ranks ``stride`` apart within blocks of ``size``: the first ones and the last."""
    total = world // size * stride
    indices = list(range(total)) if total <= 4 else [0, 1, total - 1]
    listed = []
    for index in indices:
        block = index // stride * size
        members = [str(rank) for rank in range(block + index % stride, block + size, stride)]
        if stride == 1:
            listed.append(_span(block, block + size))
        else:
            listed.append(",".join(members if len(members) <= 4 else [*members[:2], "..", members[-1]]))
    if total > 4:
        listed.insert(2, "...")
    return "; ".join(listed) + (f" ({total} groups)" if total > 4 else "")


def _batch_lines(recipe: Recipe, world_size: int, memory: Estimate) -> Iterator[str]:
    batch = recipe.batch
    data = len(role_ranks(recipe, "actor", world_size)) // recipe.actor.layout.model_gpus
    rows = batch.prompts_per_step * batch.rows_per_prompt
    updates = batch.updates_per_step
    if recipe.epochs is not None:
        of_run = f"{recipe.steps} steps, by all rows of the files" if recipe.steps else "steps are counted by the run"
        yield f"{recipe.epochs:g} epochs: {of_run}"
    if isinstance(recipe, RLRecipe):
        yield f"{batch.prompts_per_step} prompts x {batch.rows_per_prompt} responses = {rows} rows"
        if memory.rollout is not None:
            replicas = memory.rollout.replicas
            yield f"rollout: {_mean(rows, replicas)} rows for each of {_count(replicas, 'replica')}"
    else:
        yield f"{rows} rows" if recipe.rows_per_response == 1 else f"{rows} pairs"
    per_update = batch.prompts_per_update * batch.rows_per_prompt * recipe.rows_per_response
    yield (
        f"update: {_count(updates, 'optimizer step')} of {per_update} rows, {_mean(per_update, data)} per "
        f"data-parallel rank, in micro-batches of up to {micro_batch_tokens(recipe, recipe.actor):,} tokens"
    )
    if isinstance(recipe, RLRecipe) and recipe.actor.shared_prompts:
        prompt, responses = lengths(recipe, rows)
        saved = prompt * (rows - batch.prompts_per_step) / (prompt * rows + sum(responses))
        yield f"prompts of {prompt:.0f} tokens once for their groups: up to {saved:.0%} of the tokens are not computed"


def _mean(total: int, parts: int) -> str:
    return str(total // parts) if total % parts == 0 else f"about {total / parts:.0f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _memory_lines(recipe: Recipe, memory: Estimate, actor: Architecture) -> Iterator[str]:
    for name, stages in memory.roles.items():
        yield _role_memory_line(name, stages)
    rollout = memory.rollout
    if rollout is not None:
        shared = f" (of which {rollout.shared:.1f} in the actor's memory)" if rollout.shared >= 0.05 else ""
        yield (
            f"rollout: weights {rollout.weights:.1f}{shared} + KV cache {rollout.kv_cache:.1f}: "
            f"{rollout.cache_tokens:,} tokens, or {rollout.full_length_sequences:,} sequences of full length at a time "
            "per replica"
        )
        if not rollout.is_known:
            yield (
                "rollout: of these weights none count as the actor's memory until a run, or "
                "tools/learn_weight_map.py, has learned how vLLM lays them out"
            )
        if rollout.choices:
            yield f"rollout: choices of experts, for router replay: {rollout.choices:.1f} beside the cache"
        if isinstance(recipe, RLRecipe) and recipe.rollout.speculative:
            yield _speculative_line(recipe.rollout, recipe.rollout.speculative, actor.vocabulary)
        if isinstance(recipe, RLRecipe) and recipe.rollout.updates_in_flight:
            where = "pinned host memory" if recipe.rollout.sleep and not recipe.rollout_is_ahead else "its place"
            yield f"rollout: KV cache of responses in flight, in {where} during updates: {rollout.kv_cache:.1f}"
        if isinstance(recipe, RLRecipe) and recipe.why_weights_are_copied:
            yield f"rollout: all weights are copies, since {recipe.why_weights_are_copied}"
    if memory.judge is not None and isinstance(recipe, RLRecipe) and recipe.judge:
        yield _judge_memory_line(memory.judge, recipe.judge)
    limit, reserve = recipe.cluster.planned_memory_gb, recipe.cluster.memory_reserve_gb
    if reserve:
        yield f"{reserve:g} of {recipe.cluster.gpu_memory_gb:g} are kept free (cluster.memory_reserve_gb)"
    for phase, needed in memory.phases.items():
        verdict = f"does NOT fit: {_advice(recipe, phase, actor)}" if needed > limit else "fits"
        if verdict == "fits" and needed > TIGHT * limit:
            verdict = "fits barely"
        yield f"phase {phase}: {needed:.1f} of {limit:g}, {verdict}"
    if rollout is not None and not rollout.full_length_sequences:
        yield "the KV cache does NOT hold one sequence of full length: raise rollout.gpu_memory_utilization"
    if memory.judge is not None and memory.judge.weights and not memory.judge.full_length_sequences:
        yield "the judge's KV cache does NOT hold one verdict of full length: raise judge.kv_cache_gb"
    if keeps_logits(recipe, recipe.actor, actor) or actor.head == "scalar":
        return
    logits = all_logits(recipe, recipe.actor, actor)
    if logits > _LARGE_LOGITS_GB and memory.phases["update"] + logits < TIGHT * limit:
        enough = math.ceil(10 * logits) / 10
        yield f"an update computes its logits twice; actor.kept_logits_gb={enough:g} fits, and computes them once"


def _judge_memory_line(judge: RolloutMemory, section: JudgeSection) -> str:
    when = "while it judges" if section.sleep else "in every phase"
    if not judge.weights:
        return (
            f"judge: KV cache {judge.kv_cache:.1f}, {when}; its weights are NOT counted: {section.path} has no "
            "config.json here, or a model of a family that vLLM alone knows"
        )
    away = ", in pinned host memory otherwise," if section.sleep else ""
    return (
        f"judge, {when}: weights {judge.weights:.1f}{away} + KV cache {judge.kv_cache:.1f}: {judge.cache_tokens:,} "
        f"tokens, or {judge.full_length_sequences:,} verdicts of full length at a time per replica"
    )


def _speculative_line(rollout: RolloutSection, section: SpeculativeSection, vocabulary: int) -> str:
    sequences = min(section.max_running, rollout.max_num_seqs)
    logits = 4 * sequences * (section.num_speculative_tokens + 1) * vocabulary / GB
    drafts = f"drafts of {_count(section.num_speculative_tokens, 'token')} ({section.method})"
    line = f"rollout: {drafts} while at most {_count(sequences, 'sequence')} run per replica: logits {logits:.1f}"
    if section.method != "suffix":
        return line
    return f"{line}, text of earlier epochs at most {4 * MOST_HISTORY_TOKENS / GB:.2g} in host memory per rank"


def _role_memory_line(name: str, stages: list[StageMemory]) -> str:
    role = max(stages, key=lambda stage: stage.peak)
    where = f", stage {role.stage}" if len(stages) > 1 else ""
    parts: Sequence[tuple[str, float]] = (
        ("weights", role.weights),
        *([("adapters and weights without them", role.adapters)] if role.adapters else []),
        ("gradients", role.gradients),
        ("optimizer", role.optimizer),
        *([("weights in 8 bits", role.fp8)] if role.fp8 else []),
        ("activations", role.activations),
        ("logits", role.logits),
    )
    if not role.gradients:
        parts = (("weights", role.weights), ("forward pass", role.logprobs))
    shown = " + ".join(f"{part} {size:.1f}" for part, size in parts)
    away = role.model_states - role.resident
    offloaded = f", of which {away:.1f} leave between phases" if away else ""
    streamed = f"; {role.streamed:.1f} of its optimizer in host memory, {role.stream_buffer:.1f} at a time on the GPU"
    base = f"; {role.base_on_host:.1f} of weights without adapters in host memory"
    return (
        f"{name}{where}: {role.parameters:,} parameters; {shown} = {role.peak:.1f}{offloaded}"
        f"{streamed if role.streamed else ''}{base if role.base_on_host else ''}"
    )


def _advice(recipe: Recipe, phase: str, actor: Architecture) -> str:
    if phase == "generate":
        return (
            "lower rollout.gpu_memory_utilization, set offload of the roles, or raise actor.layout.tensor or pipeline"
        )
    if phase == "logprobs":
        return "lower logprob_tokens_per_gpu of each role"
    first = "set actor.kept_logits_gb to 0, " if keeps_logits(recipe, recipe.actor, actor) else ""
    if recipe.actor.recompute.granularity != "full":
        return f"{first}lower actor.tokens_per_gpu, or set actor.recompute.granularity to full"
    return f"{first}lower actor.tokens_per_gpu, or raise actor.layout.tensor or pipeline"
