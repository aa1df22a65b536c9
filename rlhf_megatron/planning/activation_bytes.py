"""The bytes of activations that ranks on different hosts send each other in a step: arithmetic alone.

A forward pass sums [tokens, hidden] over the tensor-parallel ranks once for the embedding and twice for a layer
(Megatron-LM, arXiv 1909.08053), a backward pass twice for a layer and once for the head; stages hand their
activations on, and gradients back; tokens go to their experts and return; ranks that share rows exchange keys and
values, and in delta nets tokens for heads. Layouts that keep a layer's ranks on one host send little else than this
between stages.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.flops import kv_cache_bytes_per_token
from rlhf_megatron.planning.edges import Edges
from rlhf_megatron.planning.parameters import stage_layer_indices
from rlhf_megatron.planning.row_lengths import lengths
from rlhf_megatron.planning.stage_memory import ELEMENT_BYTES, recomputed_layers
from rlhf_megatron.recipe import RLRecipe, RoleSection, rollout_ranks
from rlhf_megatron.recipe.drafting import DRAFT
from rlhf_megatron.topology.layout import Layout

_STATISTICS = 16  # bytes of a sampled token: the head's largest logit, and three sums over the vocabulary's parts


@dataclasses.dataclass(frozen=True)
class _Passes:
    """The number of forward and backward passes of a phase over a role's tokens."""

    phase: str
    forward: int
    backward: int = 0


@dataclasses.dataclass(frozen=True)
class _Role:
    """A role as its activations need it; ``hosts`` are those of the layout's positions."""

    recipe: RLRecipe
    name: str
    model: Architecture
    layout: Layout
    hosts: Sequence[int]

    @property
    def section(self) -> RoleSection:
        """Its section of the recipe."""
        return self.recipe.roles[self.name]

    @property
    def element(self) -> int:
        """Bytes of a number of its activations."""
        return ELEMENT_BYTES[self.recipe.dtype_of(self.section)]

    @property
    def vector(self) -> int:
        """Bytes of a token between two layers."""
        return self.model.hidden * self.element

    def tokens(self) -> tuple[float, float]:
        """Return (tokens that a rank computes in a pass over the step's rows, sampled ones among them)."""
        recipe = self.recipe
        prompts = recipe.batch.prompts_per_step
        rows = prompts * recipe.batch.rows_per_prompt
        prompt, responses = lengths(recipe, rows)
        spared = prompt * (rows - prompts) if recipe.shares_prompts(self.section) else 0.0
        ranks = self.layout.data * self.layout.context
        return (prompt * rows - spared + responses.tokens) / ranks, responses.tokens / ranks

    def stage_of(self, position: int) -> int:
        """Return the pipeline stage of a position."""
        return position // (self.layout.size // self.layout.pipeline)

    def hosts_of(self, group: Sequence[int]) -> list[int]:
        """Return the hosts of a group of positions."""
        return [self.hosts[position] for position in group]


def role_activations(
    recipe: RLRecipe, name: str, model: Architecture, layout: Layout, hosts: Sequence[int]
) -> dict[str, Edges]:
    """Return what each phase carries for a role; ``hosts`` are those of the layout's positions."""
    role, by_phase = _Role(recipe, name, model, layout, hosts), {}
    for passes in _passes(recipe, name):
        edges = by_phase[passes.phase] = Edges()
        for add in (_tensor_sums, _between_stages, _to_experts, _keys_and_values, _tokens_for_heads):
            add(edges, role, passes)
    return by_phase


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
    asked = {"actor": recipe.old_logprobs == "recompute" or recipe.reference_is_base, DRAFT: False}.get(name, True)
    if asked:
        twice = name == "actor" and recipe.old_logprobs == "recompute" and recipe.reference_is_base
        yield _Passes("score" if name == "reward_model" else "logprobs", 1 + twice)
    if recipe.roles[name].learns_by:
        yield _Passes("update_critic" if name == "critic" else "update", recipe.batch.passes, recipe.batch.passes)


def _tensor_sums(edges: Edges, role: _Role, passes: _Passes) -> None:
    (tokens, outputs), layout, model = role.tokens(), role.layout, role.model
    sizes = []
    for stage in range(layout.pipeline):
        layers = stage_layer_indices(model, layout, stage)
        sums = sum(1 if _has_experts(model, layer) else 2 for layer in layers)
        again = sums * recomputed_layers(role.section, layout, len(layers)) / len(layers)
        if "mlp" in role.section.recompute.selected:
            again += sum(not _has_experts(model, layer) for layer in layers)
        vectors = tokens * (passes.forward * (sums + (stage == 0)) + passes.backward * (sums + again))
        size = vectors * role.vector
        if stage == layout.pipeline - 1 and model.head != "scalar":
            size += outputs * (passes.forward * _STATISTICS + passes.backward * role.vector)
        sizes.append(size)
    for group in layout.groups_along("tensor"):
        edges.all_reduce(role.hosts_of(group), sizes[role.stage_of(group[0])])


def _between_stages(edges: Edges, role: _Role, passes: _Passes) -> None:
    layout, (tokens, _) = role.layout, role.tokens()
    cut = layout.tensor if _is_sequence_parallel(role.section, role.model) else 1
    size = tokens * role.vector / cut
    for group in layout.groups_along("pipeline"):
        for chunk in range(layout.virtual_pipeline):
            turns = [*group, group[0]] if chunk < layout.virtual_pipeline - 1 else group
            for source, target in itertools.pairwise(role.hosts_of(turns)):
                edges.add(source, target, size * passes.forward)
                edges.add(target, source, size * passes.backward)


def _to_experts(edges: Edges, role: _Role, passes: _Passes) -> None:
    layout, model = role.layout, role.model
    if not model.experts or layout.expert == 1:
        return
    tokens = role.tokens()[0] / layout.tensor
    again = role.section.recompute.granularity == "full" or "moe" in role.section.recompute.selected
    ways = 2 * (passes.forward + passes.backward * (1 + again))  # there and back again
    for group in layout.expert_groups_along("expert"):
        layers = stage_layer_indices(model, layout, role.stage_of(group[0]))
        routed = sum(_has_experts(model, layer) for layer in layers)
        size = tokens * model.experts.chosen * role.vector * routed * ways
        hosts = role.hosts_of(group)
        edges.spread(hosts, hosts, size * len(group))


def _keys_and_values(edges: Edges, role: _Role, passes: _Passes) -> None:
    layout, (tokens, _) = role.layout, role.tokens()
    if layout.context == 1:
        return
    of_token = kv_cache_bytes_per_token(role.model, layout.tensor, role.element) / layout.pipeline
    size = tokens * of_token * (layout.context - 1) * (passes.forward + 2 * passes.backward)
    for group in layout.groups_along("context"):
        edges.ring(role.hosts_of(group), size)


def _tokens_for_heads(edges: Edges, role: _Role, passes: _Passes) -> None:
    """Note queries, keys, values, strengths and decays that the ranks of a row deal out by heads, and outputs that
    return."""
    layout, net = role.layout, role.model.delta_net
    if layout.context == 1 or net is None:
        return
    numbers = 2 * (net.keys + net.values + net.value_heads) / layout.tensor
    for group in layout.groups_along("context"):
        layers = stage_layer_indices(role.model, layout, role.stage_of(group[0]))
        nets = sum(role.model.layer_kinds[layer].attention == "delta" for layer in layers)
        again = recomputed_layers(role.section, layout, len(layers)) / len(layers)
        size = role.tokens()[0] * numbers * role.element * nets * (passes.forward + passes.backward * (1 + again))
        hosts = role.hosts_of(group)
        edges.spread(hosts, hosts, size * len(group))


def _has_experts(model: Architecture, layer: int) -> bool:
    return model.layer_kinds[layer].feed_forward == "experts"


def _is_sequence_parallel(section: RoleSection, model: Architecture) -> bool:
    return section.sequence_parallel or model.cuts_sequences
