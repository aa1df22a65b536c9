"""Expected time in which a step's responses are generated: arithmetic alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from rlhf_megatron.gpu_kinds import GPUS
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.flops import kv_cache_bytes, kv_cache_bytes_per_token
from rlhf_megatron.planning.links import link
from rlhf_megatron.planning.memory import RolloutMemory, estimate, kv_element_bytes
from rlhf_megatron.planning.row_lengths import RowLengths, alike_rows, lengths, routed_weights, used_weights
from rlhf_megatron.planning.stage_memory import GB
from rlhf_megatron.recipe import RLRecipe

HOST_BYTES_PER_SECOND = 40e9  # of weights that come from page-locked memory
# Generation: what of the memory's bandwidth reading weights and cache comes to, and what each token takes besides.
_OF_WEIGHTS, _OF_CACHE, _SECONDS_PER_TOKEN = 0.95, 0.8, 1.9e-3
_OF_PEAK_IN_ROLLOUT = 0.6
# An all-reduce of few tokens: to begin with, and for the bytes that each has from the others.
_ALL_REDUCE_SECONDS, _ALL_REDUCE_BYTES_PER_SECOND = 5e-6, 150e9


def tail_seconds(recipe: RLRecipe, architectures: Mapping[str, Architecture], world: int) -> float:
    """Return by how much generation is longer than if all responses had the mean length."""
    memory = estimate(recipe, architectures, world).rollout
    assert memory is not None
    prompt, responses = lengths(recipe, recipe.batch.prompts_per_step * recipe.batch.rows_per_prompt)
    drawn, alike = (
        generation_seconds(recipe, architectures["actor"], memory, rows, prompt)
        for rows in (responses, alike_rows(responses.mean, len(responses)))
    )
    return max(0.0, drawn - alike)


def _weights_of_token(recipe: RLRecipe, model: Architecture) -> Callable[[float], float]:
    """Return what gives the bytes of weights that a token of so many sequences reads, whose experts are drawn
    independently: in 8 bits all but the output layer's."""
    used, of_expert, experts = used_weights(model), routed_weights(model, 1.0), model.experts

    def read(sequences: float) -> float:
        weights = used
        if experts:
            reached = experts.count * (1 - (1 - experts.chosen / experts.count) ** sequences)
            weights += of_expert * (reached - experts.chosen)
        return weights + (model.hidden * model.vocabulary if recipe.rollout.quantization else weights)

    return read


def _in_flight(recipe: RLRecipe, responses: Sequence[float]) -> float:
    """Return the mean responses that run where they go on after an update.

    A group is there as long as its longest response runs, and of the groups that a step begins with, half of those that
    it gives are whole in the mean.
    """
    rows = recipe.batch.rows_per_prompt
    shares = [(position / len(responses)) ** rows for position in range(len(responses) + 1)]
    longest = sum(
        length * (share - before)
        for length, before, share in zip(sorted(responses), shares[:-1], shares[1:], strict=True)
    )
    groups = recipe.batch.prompts_per_step * (recipe.rollout.groups_begun - 0.5)
    return groups * rows * fmean(responses) / longest


def generation_seconds(
    recipe: RLRecipe,
    model: Architecture,
    rollout: RolloutMemory,
    responses: RowLengths,
    prompt: float,
) -> float:
    """Return the slowest thing of each token for all sequences at a time, from the first to the end of the longest."""
    assert recipe.cluster.gpu is not None
    tensor, gpu = recipe.rollout.layout.tensor, GPUS[recipe.cluster.gpu]
    own = responses[:: rollout.replicas]
    mean = fmean(own)
    in_cache = prompt + fmean(length * length for length in own) / (2 * mean)  # of a sequence, at a moment in between
    element = kv_element_bytes(recipe)
    of_token, on_each_rank = (kv_cache_bytes_per_token(model, ranks, element) for ranks in (1, tensor))
    multiplied, read = used_weights(model), _weights_of_token(recipe, model)

    def kept(tokens: float) -> float:  # of a sequence, in all layers; less than those that it has with a window
        return kv_cache_bytes(model, 1, element, tokens) / of_token

    most = max(1, int(min(recipe.rollout.max_num_seqs, rollout.cache_tokens / kept(in_cache))))

    def seconds_of_token(sequences: float, tokens: float) -> float:
        reading = read(sequences) / tensor / (gpu.bandwidth * _OF_WEIGHTS)
        computing = 2.0 * multiplied * sequences / tensor / (gpu.flops * _OF_PEAK_IN_ROLLOUT)
        of_cache = on_each_rank * sequences * kept(tokens)
        partial = 2.0 * sequences * model.hidden  # bytes of each rank's part of a sum
        summing = partial * (tensor - 1) / _ALL_REDUCE_BYTES_PER_SECOND
        if tensor > recipe.cluster.gpus_per_node:
            summing = 2 * partial / link(recipe.cluster)  # a ring, through every node there and back
        reducing = _ALL_REDUCE_SECONDS + summing if tensor > 1 else 0.0
        return (
            max(reading, computing)
            + of_cache / (gpu.bandwidth * _OF_CACHE)
            + 2 * model.layers * reducing
            + _SECONDS_PER_TOKEN
        )

    if recipe.rollout.updates_in_flight:
        flying = min(most, _in_flight(recipe, own) / rollout.replicas)
        copied = 2 * rollout.kv_cache * GB if recipe.rollout.sleep and not recipe.rollout_is_ahead else 0.0
        return len(own) * mean / flying * seconds_of_token(flying, in_cache) + copied / HOST_BYTES_PER_SECOND
    # While others wait, as many as fit; then the last ones, of which the short ones end first.
    last = sorted(own[:: -(-len(own) // most)])
    waiting = mean * (len(own) - len(last)) / most
    seconds, before = waiting * seconds_of_token(most, in_cache), 0.0
    for index, length in enumerate(last):
        left = len(last) - index
        seconds += (length - before) * seconds_of_token(left, prompt + (length + before) / 2)
        before = length
    return seconds
