"""Expected time of a step of reinforcement learning, before any GPU has run it: arithmetic alone.

What GPUs can do is from the vendor's data sheets, how much of it is reached from whole steps of 0.5B to 32B on H200s
(docs/results.md), which the estimate meets within a sixth; of models with experts, from one of those on one GPU.
Reward functions are not in it, nor what a slow link costs but for tokens that go to experts, gradients and weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean

from rlhf_megatron.models import flops
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.flops import kv_cache_bytes, kv_cache_bytes_per_token, peak_flops
from rlhf_megatron.models.recompute import recomputed_fraction
from rlhf_megatron.monitor.columns import GENERATING
from rlhf_megatron.planning.gradient_time import exchange_seconds
from rlhf_megatron.planning.links import SUMMED_BYTES_PER_SECOND, link
from rlhf_megatron.planning.memory import RolloutMemory, estimate
from rlhf_megatron.planning.stage_memory import GB, keeps_logits, recomputed_layers
from rlhf_megatron.recipe import LayoutSection, OptimizerSection, Recipe, RLRecipe, RoleSection, role_ranks
from rlhf_megatron.recipe.operations import ClusterSection
from rlhf_megatron.recipe.world_checks import layout_of, roles_together
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.role_layout import make_layout

# Bytes per second of a GPU's memory, from the vendor's data sheets.
_MEMORY_BANDWIDTH = {
    "A100": 2.04e12,
    "A800": 2.04e12,
    "B200": 8.0e12,
    "GB200": 8.0e12,
    "H100": 3.35e12,
    "H20": 4.0e12,
    "H200": 4.8e12,
    "H800": 3.35e12,
    "L40S": 0.864e12,
}
_SIGMA = 0.6  # of the logarithm of a response's length, where the recipe does not know it

# Training: the share of the GPU's peak that a matrix of so many columns for each tensor-parallel rank comes to; a
# GPU that computes less for each byte that it reads needs fewer columns for half of the best.
_BEST_SHARE, _COLUMNS_FOR_HALF = 0.67, 420.0
_EXPERT_COLUMNS_FOR_HALF = 1700.0  # of one expert, which has few rows as well
_COMPUTED_PER_BYTE = 989e12 / 4.8e12  # of an H200
FP8_SPEED = 1.2  # of passes over those in bfloat16: others' (NeMo-RL saves 15-25% of a step of 8B), not measured here
_HOST_BYTES_PER_SECOND = 40e9  # of weights that come from page-locked memory
_STREAMED_BYTES_PER_SECOND = 15e9  # each way, with several GPUs of a host at it
# Generation: what of the memory's bandwidth reading weights and cache comes to, and what each token takes besides.
_OF_WEIGHTS, _OF_CACHE, _SECONDS_PER_TOKEN = 0.95, 0.8, 1.9e-3
_OF_PEAK_IN_ROLLOUT = 0.6
# An all-reduce of few tokens: to begin with, and for the bytes that each has from the others.
_ALL_REDUCE_SECONDS, _ALL_REDUCE_BYTES_PER_SECOND = 5e-6, 150e9


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
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / gpus


def expected_time(recipe: RLRecipe, architectures: Mapping[str, Architecture], world: int) -> ExpectedTime | None:
    """The time of a step on ``world`` GPUs of the kind ``cluster.gpu``; None where there are no figures for it.

    ``architectures``: of each role, with its head. Prompts are taken to be half as long as they may be, or as long in a
    benchmark that draws lengths; responses half as long, with a lognormal spread.
    """
    if not has_figures(recipe):
        return None
    memory, gpu = estimate(recipe, architectures, world), recipe.cluster.gpu
    assert gpu is not None and memory.rollout is not None
    peak, bandwidth = peak_flops(gpu), _MEMORY_BANDWIDTH[gpu]
    assert peak is not None
    rows = recipe.batch.prompts_per_step * recipe.batch.rows_per_prompt
    prompt, responses = lengths(recipe, rows)
    whole, again = _whole_rows(prompt, responses), _alike(prompt, rows - recipe.batch.prompts_per_step)
    phases = {"generate": _generate(recipe, architectures["actor"], memory.rollout, responses, prompt, peak, bandwidth)}
    passes: dict[str, dict[str, float]] = {"score": {}, "logprobs": {}, "update": {}}
    exchanges: dict[str, tuple[float, float]] = {}
    placed = {name: role_ranks(recipe, name, world) for name in memory.roles}
    for name, ranks in placed.items():
        model, section = architectures[name], recipe.roles[name]
        spared = again if recipe.shares_prompts(section) else _NO_ROWS
        speed = len(ranks) * peak * _share_of_peak(model, layout_of(recipe, section), recipe.cluster, peak)
        speed *= FP8_SPEED if section.fp8_recipe else 1.0
        if name != "actor" or recipe.old_logprobs == "recompute":
            phase = "score" if name == "reward_model" else "logprobs"
            passes[phase][name] = _forward_flops(model, whole, responses.tokens, spared=spared) / speed
        if section.learns_by:
            streamed = fmean(stage.streamed for stage in memory.roles[name]) * GB
            base_passes = fmean(stage.base_on_host for stage in memory.roles[name]) * GB / _HOST_BYTES_PER_SECOND
            twice = not keeps_logits(recipe, section, model)
            computing = _update(
                recipe, section, model, whole, spared, responses.tokens, len(ranks), speed, streamed, twice
            )
            exchange = functools.partial(
                exchange_seconds, recipe, section, memory.roles[name], len(ranks), whole.tokens, computing
            )
            exchanges[name] = exchange(section.learns_by), exchange(_all_overlapped(section, section.learns_by))
            passes["update"][name] = computing + exchanges[name][0] + base_passes * recipe.batch.updates_per_step
    spared = again if recipe.actor.shared_prompts else _NO_ROWS
    if recipe.reference_is_base:
        ranks = placed["actor"]
        speed = len(ranks) * peak * _share_of_peak(architectures["actor"], recipe.actor.layout, recipe.cluster, peak)
        # With old logprobs the same ranks do one after the other.
        passes["logprobs"]["actor"] = passes["logprobs"].get("actor", 0.0) + (
            _forward_flops(architectures["actor"], whole, responses.tokens, spared=spared) / speed
            + 2 * fmean(stage.base_on_host for stage in memory.roles["actor"]) * GB / _HOST_BYTES_PER_SECOND
        )
    for phase, of_roles in passes.items():
        phases[phase] = max(
            sum(of_roles[name] for name in of_roles if name in here) for here in roles_together(recipe, world)
        )
    taken = {phase: seconds for phase, seconds in phases.items() if seconds}
    frozen = recipe.actor.adapters is not None
    needed = _training_flops(architectures["actor"], whole, responses.tokens, frozen=frozen, spared=spared)
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


class RowLengths(tuple[float, ...]):
    """Lengths of rows, the same as these objects alone: all layouts of a search have those of one step, a million."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Return whether it is the same object."""
        return self is other

    @functools.cached_property
    def tokens(self) -> float:
        """All of them together."""
        return sum(self)

    @functools.cached_property
    def mean(self) -> float:
        """Mean length."""
        return fmean(self)


_NO_ROWS, _ONE_TOKEN = RowLengths(), RowLengths([1])


@functools.lru_cache(maxsize=8)
def _whole_rows(prompt: float, responses: RowLengths) -> RowLengths:
    return RowLengths(prompt + response for response in responses)


@functools.lru_cache(maxsize=8)
def _alike(length: float, rows: int) -> RowLengths:
    return RowLengths([length] * rows)


@functools.lru_cache(maxsize=64)
def _forward_flops(model: Architecture, rows: RowLengths, outputs: float, spared: RowLengths = _NO_ROWS) -> float:
    return flops.forward_flops(model, rows, outputs, spared=spared)


@functools.lru_cache(maxsize=64)
def _training_flops(model: Architecture, rows: RowLengths, outputs: float, frozen: bool, spared: RowLengths) -> float:
    return flops.training_flops(model, rows, outputs, frozen=frozen, spared=spared)


def lengths(recipe: RLRecipe, rows: int) -> tuple[float, RowLengths]:
    """(tokens of a prompt, of each response): evenly spaced quantiles of the distribution, cut at the longest."""
    drawn, longest = recipe.rollout.drawn_lengths, recipe.rollout.max_response_length
    mean, sigma = (drawn.mean, drawn.sigma) if drawn else (longest / 2, _SIGMA)
    return recipe.data.max_prompt_length / (1 if drawn else 2), _response_lengths(mean, sigma, longest, rows)


@functools.lru_cache(maxsize=8)
def _response_lengths(mean: float, sigma: float, longest: int, rows: int) -> RowLengths:
    spread = NormalDist(math.log(mean) - sigma**2 / 2, sigma) if sigma else None
    quantiles = ((row + 0.5) / rows for row in range(rows))
    return RowLengths(min(longest, math.exp(spread.inv_cdf(q)) if spread else mean) for q in quantiles)


def head_in_layers(recipe: RLRecipe, model: Architecture) -> float:
    """Return how many decoder layers of the actor's ``model`` have as much to compute in a step as its head has."""
    prompt, responses = lengths(recipe, recipe.batch.prompts_per_step * recipe.batch.rows_per_prompt)
    twice = not keeps_logits(recipe, recipe.actor, model)
    rows = len(responses) - recipe.batch.prompts_per_step if recipe.actor.shared_prompts else 0
    return _head_in_layers(model, _whole_rows(prompt, responses), _alike(prompt, rows), responses.tokens, twice)


def stage_work(layers: Sequence[int], head: float) -> list[float]:
    """Return the work of each pipeline stage, in layers: the last one has the ``head`` besides."""
    return [*layers[:-1], layers[-1] + head]


def _head_in_layers(model: Architecture, whole: RowLengths, spared: RowLengths, outputs: float, twice: bool) -> float:
    """Return the head's work in layers, for ``outputs`` of these rows' tokens; ``twice``: an update repeats it."""
    body, both = (_forward_flops(model, whole, read, spared=spared) for read in (0, outputs))
    return (4 / 3 if twice else 1) * (both - body) / (body / model.layers)


@functools.lru_cache(maxsize=16)  # a plan asks for each token of each layout
def _weights(model: Architecture) -> float:
    """Weights that one token is multiplied with: all but the embedding."""
    return _forward_flops(model, _ONE_TOKEN, 1) / 2


def _routed_weights(model: Architecture, experts: float) -> float:
    """Return the weights of ``experts`` routed experts in all layers that have them."""
    if model.experts is None:
        return 0.0
    layers = sum(count for kind, count in model.kind_counts.items() if kind.feed_forward == "experts")
    return 3.0 * layers * experts * model.hidden * model.experts.feed_forward


def _share_of_peak(model: Architecture, layout: LayoutSection, cluster: ClusterSection, peak: float) -> float:
    """Share of the peak that training comes to, less waiting for others: tensor-parallel sums and tokens to experts."""
    tensor, weights = layout.tensor, _weights(model)
    assert cluster.gpu is not None
    relative = min(1.0, peak / _MEMORY_BANDWIDTH[cluster.gpu] / _COMPUTED_PER_BYTE)

    def seconds(weights: float, columns: float, columns_for_half: float) -> float:  # of a token's forward pass
        return 2.0 * weights / tensor / (peak * _BEST_SHARE * columns / (columns + relative * columns_for_half))

    routed = _routed_weights(model, model.experts.chosen) if model.experts else 0.0
    taken = seconds(weights - routed, model.hidden / tensor, _COLUMNS_FOR_HALF)
    received = 8.0 * model.layers * model.hidden * (tensor - 1) / tensor  # of two sums in a layer
    taken += received / SUMMED_BYTES_PER_SECOND
    if model.experts:
        columns = model.experts.feed_forward / (layout.expert_tensor or tensor)
        taken += seconds(routed, columns, _EXPERT_COLUMNS_FOR_HALF) + _exchange(model, layout, cluster)
    return 2.0 * weights / tensor / peak / taken


def _exchange(model: Architecture, layout: LayoutSection, cluster: ClusterSection) -> float:
    """Seconds in which one token reaches its experts on other ranks and comes back, in all layers of a forward pass."""
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
    """Forward and backward passes with what is recomputed (``twice``: logits too), at the slowest stage's pace and with
    the bubble, and what the optimizer streams: ``streamed`` bytes on each GPU in each step of its own."""
    batch = recipe.batch
    forward = _forward_flops(model, whole, outputs, spared=spared)
    logits = forward - _forward_flops(model, whole, 0, spared=spared) if twice else 0.0
    once = _training_flops(model, whole, outputs, frozen=section.adapters is not None, spared=spared) + logits
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
    bubble = _bubble(recipe, recipe.actor, layout, _whole_rows(prompt, responses).tokens)
    return bubble / (1 + bubble)


def tail_seconds(recipe: RLRecipe, architectures: Mapping[str, Architecture], world: int) -> float:
    """Return by how much generation is longer than if all responses had the mean length."""
    memory, gpu = estimate(recipe, architectures, world).rollout, recipe.cluster.gpu
    assert memory is not None and gpu is not None
    peak = peak_flops(gpu)
    assert peak is not None
    prompt, responses = lengths(recipe, recipe.batch.prompts_per_step * recipe.batch.rows_per_prompt)
    drawn, alike = (
        _generate(recipe, architectures["actor"], memory, rows, prompt, peak, _MEMORY_BANDWIDTH[gpu])
        for rows in (responses, _alike(responses.mean, len(responses)))
    )
    return max(0.0, drawn - alike)


def _read_weights(model: Architecture, sequences: float) -> float:
    """Return the weights that a token of so many ``sequences`` reads, whose experts are drawn independently."""
    if model.experts is None:
        return _weights(model)
    count, chosen = model.experts.count, model.experts.chosen
    reached = count * (1 - (1 - chosen / count) ** sequences)
    return _weights(model) + _routed_weights(model, reached - chosen)


def _in_flight(recipe: RLRecipe, responses: Sequence[float]) -> float:
    """Return the mean responses that run where they go on after an update.

    A group is there as long as its longest response runs, and of the groups that a step begins with, half of those that
    it gives are whole in the mean.
    """
    rows = recipe.batch.rows_per_prompt
    shares = [(place / len(responses)) ** rows for place in range(len(responses) + 1)]
    longest = sum(
        length * (share - before)
        for length, before, share in zip(sorted(responses), shares[:-1], shares[1:], strict=True)
    )
    groups = recipe.batch.prompts_per_step * (recipe.rollout.groups_begun - 0.5)
    return groups * rows * fmean(responses) / longest


def _generate(
    recipe: RLRecipe,
    model: Architecture,
    rollout: RolloutMemory,
    responses: RowLengths,
    prompt: float,
    peak: float,
    bandwidth: float,
) -> float:
    """The slowest thing of each token for all sequences at a time, from the first to the end of the longest."""
    tensor = recipe.rollout.layout.tensor
    own = responses[:: rollout.replicas]
    mean = fmean(own)
    in_cache = prompt + fmean(length * length for length in own) / (2 * mean)  # of a sequence, at a moment in between
    of_token, on_each_rank = (kv_cache_bytes_per_token(model, ranks, 2) for ranks in (1, tensor))
    multiplied = _weights(model)

    def kept(tokens: float) -> float:  # of a sequence, in all layers; less than those that it has with a window
        return kv_cache_bytes(model, 1, 2, tokens) / of_token

    most = max(1, int(min(recipe.rollout.max_num_seqs, rollout.cache_tokens / kept(in_cache))))

    def seconds_of_token(sequences: float, tokens: float) -> float:
        reading = 2.0 * _read_weights(model, sequences) / tensor / (bandwidth * _OF_WEIGHTS)
        computing = 2.0 * multiplied * sequences / tensor / (peak * _OF_PEAK_IN_ROLLOUT)
        of_cache = on_each_rank * sequences * kept(tokens)
        partial = 2.0 * sequences * model.hidden  # bytes of each rank's part of a sum
        summing = partial * (tensor - 1) / _ALL_REDUCE_BYTES_PER_SECOND
        if tensor > recipe.cluster.gpus_per_node:
            summing = 2 * partial / link(recipe.cluster)  # a ring, through every node there and back
        reducing = _ALL_REDUCE_SECONDS + summing if tensor > 1 else 0.0
        return (
            max(reading, computing)
            + of_cache / (bandwidth * _OF_CACHE)
            + 2 * model.layers * reducing
            + _SECONDS_PER_TOKEN
        )

    if recipe.rollout.updates_in_flight:
        flying = min(most, _in_flight(recipe, own) / rollout.replicas)
        copied = 2 * rollout.kv_cache * GB if recipe.rollout.sleep and not recipe.rollout_is_ahead else 0.0
        return len(own) * mean / flying * seconds_of_token(flying, in_cache) + copied / _HOST_BYTES_PER_SECOND
    # While others wait, as many as fit; then the last ones, of which the short ones end first.
    last = sorted(own[:: -(-len(own) // most)])
    waiting = mean * (len(own) - len(last)) / most
    seconds, before = waiting * seconds_of_token(most, in_cache), 0.0
    for index, length in enumerate(last):
        left = len(last) - index
        seconds += (length - before) * seconds_of_token(left, prompt + (length + before) / 2)
        before = length
    return seconds
