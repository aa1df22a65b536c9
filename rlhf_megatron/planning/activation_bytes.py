"""The bytes of activations that ranks on different hosts send each other in a step: arithmetic alone.

A forward pass sums [tokens, hidden] over the tensor-parallel ranks once for the embedding and twice for a layer
(Megatron-LM, arXiv 1909.08053), a backward pass twice for a layer and once for the head; stages hand their
activations on, and gradients back; tokens go to their experts and return; ranks that share rows exchange keys and
values. Layouts that keep a layer's ranks on one host send little else than this between stages.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.flops import kv_cache_bytes_per_token
from rlhf_megatron.planning.edges import Edges
from rlhf_megatron.planning.parameters import stage_layer_indices
from rlhf_megatron.planning.stage_memory import ELEMENT_BYTES, recomputed_layers
from rlhf_megatron.planning.step_time import lengths
from rlhf_megatron.recipe import RLRecipe, RoleSection, rollout_ranks
from rlhf_megatron.topology.layout import Layout

_STATISTICS = 16  # bytes of a sampled token: the head's largest logit, and three sums over the vocabulary's parts


@dataclasses.dataclass(frozen=True)
class _Passes:
    """How often a phase goes forward and backward over a role's tokens."""

    phase: str
    forward: int
    backward: int = 0


def role_activations(
    recipe: RLRecipe, name: str, model: Architecture, layout: Layout, hosts: Sequence[int]
) -> dict[str, Edges]:
    """Return what each phase carries for a role; ``hosts`` are those of the layout's positions."""
    found = {}
    for passes in _passes(recipe, name):
        edges = Edges()
        _tensor_sums(edges, recipe, name, model, layout, hosts, passes)
        _between_stages(edges, recipe, name, model, layout, hosts, passes)
        _to_experts(edges, recipe, name, model, layout, hosts, passes)
        _keys_and_values(edges, recipe, name, model, layout, hosts, passes)
        found[passes.phase] = edges
    return found


def rollout_activations(recipe: RLRecipe, model: Architecture, world: int) -> Edges:
    """Return what replicas whose tensor-parallel ranks lie on several hosts carry while they generate."""
    edges, tensor, ranks = Edges(), recipe.rollout.layout.tensor, rollout_ranks(recipe, world)
    replicas, prompts = len(ranks) // tensor, recipe.batch.prompts_per_step
    prompt, responses = lengths(recipe, prompts * recipe.batch.rows_per_prompt)
    element = ELEMENT_BYTES[recipe.rollout.dtype or recipe.model.dtype]
    computed = (prompt * prompts + responses.tokens) / replicas
    size = element * (
        computed * model.hidden * (1 + 2 * model.layers) + responses.tokens / replicas * model.vocabulary / 2
    )
    for first in range(0, len(ranks), tensor):
        edges.all_reduce([rank // recipe.cluster.gpus_per_node for rank in ranks[first : first + tensor]], size)
    return edges


def _passes(recipe: RLRecipe, name: str) -> Iterator[_Passes]:
    asked = {"actor": recipe.old_logprobs == "recompute" or recipe.reference_is_base}.get(name, True)
    if asked:
        twice = name == "actor" and recipe.old_logprobs == "recompute" and recipe.reference_is_base
        yield _Passes("score" if name == "reward_model" else "logprobs", 1 + twice)
    if recipe.roles[name].learns_by:
        yield _Passes("update_critic" if name == "critic" else "update", recipe.batch.passes, recipe.batch.passes)


def _tokens(recipe: RLRecipe, name: str) -> tuple[float, float]:
    """(Tokens that the role computes in a pass over the step's rows, sampled ones among them.)"""
    prompts = recipe.batch.prompts_per_step
    rows = prompts * recipe.batch.rows_per_prompt
    prompt, responses = lengths(recipe, rows)
    spared = prompt * (rows - prompts) if recipe.shares_prompts(recipe.roles[name]) else 0.0
    return prompt * rows - spared + responses.tokens, responses.tokens


def _tensor_sums(
    edges: Edges,
    recipe: RLRecipe,
    name: str,
    model: Architecture,
    layout: Layout,
    hosts: Sequence[int],
    passes: _Passes,
) -> None:
    tokens, outputs = (count / layout.data / layout.context for count in _tokens(recipe, name))
    section, vector = recipe.roles[name], model.hidden * _element_bytes(recipe, name)
    of_stage = layout.size // layout.pipeline
    sizes = []
    for stage in range(layout.pipeline):
        layers = stage_layer_indices(model, layout, stage)
        sums = sum(1 if _has_experts(model, layer) else 2 for layer in layers)
        again = sums * recomputed_layers(section, layout, len(layers)) / len(layers) if passes.backward else 0.0
        vectors = tokens * (passes.forward * (sums + (stage == 0)) + passes.backward * (sums + again))
        size = vectors * vector
        if stage == layout.pipeline - 1 and model.head == "language":
            size += outputs * (passes.forward * _STATISTICS + passes.backward * vector)
        sizes.append(size)
    for group in layout.groups_along("tensor"):
        edges.all_reduce([hosts[at] for at in group], sizes[group[0] // of_stage])


def _between_stages(
    edges: Edges,
    recipe: RLRecipe,
    name: str,
    model: Architecture,
    layout: Layout,
    hosts: Sequence[int],
    passes: _Passes,
) -> None:
    tokens = _tokens(recipe, name)[0] / layout.data / layout.context
    cut = layout.tensor if _is_sequence_parallel(recipe.roles[name], model) else 1
    size = tokens * model.hidden * _element_bytes(recipe, name) / cut
    for group in layout.groups_along("pipeline"):
        for chunk in range(layout.virtual_pipeline):
            turns = [*group, group[0]] if chunk < layout.virtual_pipeline - 1 else group
            for source, target in itertools.pairwise(turns):
                edges.add(hosts[source], hosts[target], size * passes.forward)
                edges.add(hosts[target], hosts[source], size * passes.backward)


def _to_experts(
    edges: Edges,
    recipe: RLRecipe,
    name: str,
    model: Architecture,
    layout: Layout,
    hosts: Sequence[int],
    passes: _Passes,
) -> None:
    if not model.experts or layout.expert == 1:
        return
    tokens = _tokens(recipe, name)[0] / layout.data / layout.context / layout.tensor
    of_stage = layout.size // layout.pipeline
    again = recipe.roles[name].recompute.granularity == "full"
    ways = 2 * (passes.forward + passes.backward * (1 + again))  # there and back again
    for group in layout.expert_groups_along("expert"):
        layers = stage_layer_indices(model, layout, group[0] // of_stage)
        routed = sum(_has_experts(model, layer) for layer in layers)
        size = tokens * model.experts.chosen * model.hidden * _element_bytes(recipe, name) * routed * ways
        of_group = [hosts[at] for at in group]
        edges.spread(of_group, of_group, size * len(group))


def _keys_and_values(
    edges: Edges,
    recipe: RLRecipe,
    name: str,
    model: Architecture,
    layout: Layout,
    hosts: Sequence[int],
    passes: _Passes,
) -> None:
    if layout.context == 1:
        return
    tokens = _tokens(recipe, name)[0] / layout.data / layout.context
    of_token = kv_cache_bytes_per_token(model, layout.tensor, _element_bytes(recipe, name)) / layout.pipeline
    size = tokens * of_token * (layout.context - 1) * (passes.forward + 2 * passes.backward)
    for group in layout.groups_along("context"):
        edges.ring([hosts[at] for at in group], size)


def _has_experts(model: Architecture, layer: int) -> bool:
    return model.layer_kinds[layer].feed_forward == "experts"


def _is_sequence_parallel(section: RoleSection, model: Architecture) -> bool:
    return section.sequence_parallel or bool(model.experts)


def _element_bytes(recipe: RLRecipe, name: str) -> int:
    return ELEMENT_BYTES[recipe.dtype_of(recipe.roles[name])]
