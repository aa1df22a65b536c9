"""Expected time of a step of reinforcement learning, before any GPU has run it: arithmetic alone.

What GPUs can do is from the vendor's data sheets, how much of it is reached from whole steps of 0.5B to 32B on H200s
(docs/results.md), which the estimate meets within a sixth; of models with experts, from one of those on one GPU.
Reward functions are not in it, nor what a slow link costs but for tokens that go to experts, gradients and weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from statistics import fmean

from rlhf_megatron.gpu_kinds import GPUS
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.recompute import recomputed_fraction
from rlhf_megatron.monitor.columns import GENERATING
from rlhf_megatron.planning.generation_time import HOST_BYTES_PER_SECOND, generation_seconds
from rlhf_megatron.planning.gradient_time import exchange_seconds
from rlhf_megatron.planning.links import SUMMED_BYTES_PER_SECOND, link
from rlhf_megatron.planning.memory import estimate
from rlhf_megatron.planning.row_lengths import (
    NO_ROWS,
    RowLengths,
    alike_rows,
    forward_flops,
    lengths,
    routed_weights,
    training_flops,
    used_weights,
    whole_rows,
)
from rlhf_megatron.planning.stage_memory import GB, keeps_logits, recomputed_layers
from rlhf_megatron.recipe import LayoutSection, OptimizerSection, Recipe, RLRecipe, RoleSection, role_ranks
from rlhf_megatron.recipe.drafting import DRAFT
from rlhf_megatron.recipe.operations import ClusterSection
from rlhf_megatron.recipe.world_checks import layout_of, roles_together
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.role_layout import make_layout

# Training: the share of the GPU's peak that a matrix of so many columns for each tensor-parallel rank comes to; a
# GPU that computes less for each byte that it reads needs fewer columns for half of the best.
_BEST_SHARE, _COLUMNS_FOR_HALF = 0.67, 420.0
_EXPERT_COLUMNS_FOR_HALF = 1700.0  # of one expert, which has few rows as well
_COMPUTED_PER_BYTE = 989e12 / 4.8e12  # of an H200
FP8_SPEED = 1.25  # relative to bfloat16, of forward and backward: 7B on an H200
_STREAMED_BYTES_PER_SECOND = 15e9  # each way, with several GPUs of a host at it


@dataclasses.dataclass(frozen=True)
class ExpectedTime:
    """Seconds of each phase, all tokens of the step, how long a prompt and the mean response are taken to be, whether
    ranks of their own generate while others learn, the actor's model FLOPs utilisation in its update, and the seconds
    in which its data-parallel ranks only exchange gradients and weights: now, and with all overlapped that can be."""

    phases: dict[str, float]
    tokens: float
    prompt: float
    response: float
    ahead: bool
    mfu: float
    exchange: float
    least_exchange: float

    @property
    def teams(self) -> list[dict[str, float]]:
        """The phases of ranks that work at the same time."""
        if not self.ahead:
            return [self.phases]
        generating = {name: seconds for name, seconds in self.phases.items() if name in GENERATING}
        return [generating, {name: seconds for name, seconds in self.phases.items() if name not in GENERATING}]

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return max(sum(phases.values()) for phases in self.teams)

    def speed(self, gpus: int) -> float:
        """Return tokens per second and GPU."""
        return self.tokens / self.seconds / gpus


def expected_time(recipe: RLRecipe, architectures: Mapping[str, Architecture], world: int) -> ExpectedTime | None:
    """Return the time of a step on ``world`` GPUs of the kind ``cluster.gpu``; None where there are no figures for it.

    ``architectures``: of each role, with its head. Prompts are taken to be half as long as they may be, or as long in a
    benchmark that draws lengths; responses half as long, with a lognormal spread.
    """
    if not has_figures(recipe):
        return None
    memory, gpu = estimate(recipe, architectures, world), recipe.cluster.gpu
    assert gpu is not None and memory.rollout is not None
    peak = GPUS[gpu].flops
    rows = recipe.batch.prompts_per_step * recipe.batch.rows_per_prompt
    prompt, responses = lengths(recipe, rows)
    whole, again = whole_rows(prompt, responses), alike_rows(prompt, rows - recipe.batch.prompts_per_step)
    phases = {"generate": generation_seconds(recipe, architectures["actor"], memory.rollout, responses, prompt)}
    passes: dict[str, dict[str, float]] = {"score": {}, "logprobs": {}, "update": {}}
    exchanges: dict[str, tuple[float, float]] = {}
    placed = {name: role_ranks(recipe, name, world) for name in memory.roles}
    for name, ranks in placed.items():
        model, section = architectures[name], recipe.roles[name]
        spared = again if recipe.shares_prompts(section) else NO_ROWS
        speed = len(ranks) * peak * _share_of_peak(model, layout_of(recipe, section), recipe.cluster)
        speed *= FP8_SPEED if section.fp8_recipe else 1.0
        if recipe.old_logprobs == "recompute" if name == "actor" else name != DRAFT:
            phase = "score" if name == "reward_model" else "logprobs"
            passes[phase][name] = forward_flops(model, whole, responses.tokens, spared=spared) / speed
        if section.learns_by:
            streamed = fmean(stage.streamed for stage in memory.roles[name]) * GB
            base_passes = fmean(stage.base_on_host for stage in memory.roles[name]) * GB / HOST_BYTES_PER_SECOND
            twice = not keeps_logits(recipe, section, model)
            computing = _update(
                recipe, section, model, whole, spared, responses.tokens, len(ranks), speed, streamed, twice
            )
            exchange = functools.partial(
                exchange_seconds, recipe, section, memory.roles[name], len(ranks), whole.tokens, computing
            )
            exchanges[name] = exchange(section.learns_by), exchange(_all_overlapped(section, section.learns_by))
            passes["update"][name] = computing + exchanges[name][0] + base_passes * recipe.batch.updates_per_step
    spared = again if recipe.actor.shared_prompts else NO_ROWS
    if recipe.reference_is_base:
        ranks = placed["actor"]
        speed = len(ranks) * peak * _share_of_peak(architectures["actor"], recipe.actor.layout, recipe.cluster)
        # With old logprobs the same ranks do one after the other.
        passes["logprobs"]["actor"] = passes["logprobs"].get("actor", 0.0) + (
            forward_flops(architectures["actor"], whole, responses.tokens, spared=spared) / speed
            + 2 * fmean(stage.base_on_host for stage in memory.roles["actor"]) * GB / HOST_BYTES_PER_SECOND
        )
    for phase, of_roles in passes.items():
        phases[phase] = max(
            sum(of_roles[name] for name in of_roles if name in here) for here in roles_together(recipe, world)
        )
    taken = {phase: seconds for phase, seconds in phases.items() if seconds}
    frozen = recipe.actor.adapters is not None
    needed = training_flops(architectures["actor"], whole, responses.tokens, frozen=frozen, spared=spared)
    mfu = needed * recipe.batch.passes / passes["update"]["actor"] / len(placed["actor"]) / peak
    ahead = recipe.rollout_is_ahead
    return ExpectedTime(taken, whole.tokens, prompt, responses.mean, ahead, mfu, *exchanges["actor"])


def _all_overlapped(section: RoleSection, optimizer: OptimizerSection) -> OptimizerSection:
    """Return a role's optimizer with everything overlapped that can be."""
    gathers = optimizer.distributed and section.adapters is None
    return optimizer.model_copy(update={"overlap_grad_reduce": True, "overlap_param_gather": gathers})


def has_figures(recipe: Recipe) -> bool:
    """Return whether ``expected_time`` has figures: for reinforcement learning, not in float32."""
    return isinstance(recipe, RLRecipe) and recipe.cluster.gpu is not None and recipe.model.dtype != "float32"


def head_in_layers(recipe: RLRecipe, model: Architecture) -> float:
    """Return how many decoder layers of the actor's ``model`` have as much to compute in a step as its head has."""
    prompt, responses = lengths(recipe, recipe.batch.prompts_per_step * recipe.batch.rows_per_prompt)
    twice = not keeps_logits(recipe, recipe.actor, model)
    rows = len(responses) - recipe.batch.prompts_per_step if recipe.actor.shared_prompts else 0
    return _head_in_layers(model, whole_rows(prompt, responses), alike_rows(prompt, rows), responses.tokens, twice)


def stage_work(layers: Sequence[int], head: float) -> list[float]:
    """Return the work of each pipeline stage, in layers: the last one has the ``head`` besides."""
    return [*layers[:-1], layers[-1] + head]


def _head_in_layers(model: Architecture, whole: RowLengths, spared: RowLengths, outputs: float, twice: bool) -> float:
    """Return the head's work in layers, for ``outputs`` of these rows' tokens; ``twice``: an update repeats it."""
    body, both = (forward_flops(model, whole, read, spared=spared) for read in (0, outputs))
    return (4 / 3 if twice else 1) * (both - body) / (body / model.layers)


def _share_of_peak(model: Architecture, layout: LayoutSection, cluster: ClusterSection) -> float:
    """Return the share of the peak that training comes to, less waiting for others: tensor-parallel sums and tokens to
    experts."""
    tensor, weights = layout.tensor, used_weights(model)
    assert cluster.gpu is not None
    gpu = GPUS[cluster.gpu]
    peak, relative = gpu.flops, min(1.0, gpu.flops / gpu.bandwidth / _COMPUTED_PER_BYTE)

    def seconds(weights: float, columns: float, columns_for_half: float) -> float:  # of a token's forward pass
        return 2.0 * weights / tensor / (peak * _BEST_SHARE * columns / (columns + relative * columns_for_half))

    routed = routed_weights(model, model.experts.chosen) if model.experts else 0.0
    taken = seconds(weights - routed, model.hidden / tensor, _COLUMNS_FOR_HALF)
    received = 8.0 * model.layers * model.hidden * (tensor - 1) / tensor  # of two sums in a layer
    taken += received / SUMMED_BYTES_PER_SECOND
    if model.experts:
        columns = model.experts.feed_forward / (layout.expert_tensor or tensor)
        taken += seconds(routed, columns, _EXPERT_COLUMNS_FOR_HALF) + _exchange(model, layout, cluster)
    return 2.0 * weights / tensor / peak / taken


def _exchange(model: Architecture, layout: LayoutSection, cluster: ClusterSection) -> float:
    """Return seconds in which one token reaches its experts on other ranks and comes back, in all layers of a forward
    pass."""
    assert model.experts is not None
    layers = sum(count for kind, count in model.kind_counts.items() if kind.feed_forward == "experts")
    copies = model.experts.chosen * (layout.expert - 1) / layout.expert / layout.tensor
    nodes = layout.expert * (layout.expert_tensor or layout.tensor) / cluster.gpus_per_node
    outside = max(0.0, 1 - 1 / nodes)
    between = link(cluster)
    return 4.0 * layers * model.hidden * copies * (outside / between + (1 - outside) / SUMMED_BYTES_PER_SECOND)


def _update(
    recipe: Recipe,
    section: RoleSection,
    model: Architecture,
    whole: RowLengths,
    spared: RowLengths,
    outputs: float,
    gpus: int,
    speed: float,
    streamed: float,
    twice: bool,
) -> float:
    """Return forward and backward passes with what is recomputed (``twice``: logits too), at the slowest stage's pace
    and with the bubble, and what the optimizer streams: ``streamed`` bytes on each GPU in each step of its own."""
    batch = recipe.batch
    forward = forward_flops(model, whole, outputs, spared=spared)
    logits = forward - forward_flops(model, whole, 0, spared=spared) if twice else 0.0
    once = training_flops(model, whole, outputs, frozen=section.adapters is not None, spared=spared) + logits
    layout = make_layout(layout_of(recipe, section), gpus)
    stages = layout.stage_layers(model.layers)
    work = stage_work(stages, _head_in_layers(model, whole, spared, outputs, twice))
    modules = recomputed_fraction(model, section.recompute.selected)
    slowest = max(
        (once + forward * (modules + recomputed_layers(section, layout, layers) / layers)) * part
        for layers, part in zip(stages, work, strict=True)
    )
    seconds = slowest / fmean(work) / speed
    seconds *= 1 + _bubble(recipe, section, layout, whole.tokens - spared.tokens)
    streaming = batch.minibatches_per_step * streamed / _STREAMED_BYTES_PER_SECOND
    return (seconds + streaming) * batch.passes


def _bubble(recipe: Recipe, section: RoleSection, layout: Layout, tokens: float) -> float:
    """Return the time that a stage waits for others in an update of so many tokens, over that in which it computes."""
    of_rank = tokens / recipe.batch.minibatches_per_step / layout.data
    micro_batches = of_rank / (section.update_tokens * layout.context)
    return (layout.pipeline - 1) / max(1.0, micro_batches) / layout.virtual_pipeline


def bubble_share(recipe: RLRecipe, world: int) -> float:
    """Return the share of the actor's passes in an update that its pipeline stages wait for each other."""
    prompt, responses = lengths(recipe, recipe.batch.prompts_per_step * recipe.batch.rows_per_prompt)
    layout = make_layout(recipe.actor.layout, len(role_ranks(recipe, "actor", world)))
    bubble = _bubble(recipe, recipe.actor, layout, whole_rows(prompt, responses).tokens)
    return bubble / (1 + bubble)
