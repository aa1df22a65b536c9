"""The bytes that ranks on different hosts send each other in one step, by phase and kind: arithmetic alone.

Payloads are counted, as collectives carry them: an all-reduce of S bytes sends 2 (n - 1) / n S from each of n ranks to
the next one of a ring (Patarasuk and Yuan 2009), of which those matter whose next one is on another host. Left out:
headers, messages below a kilobyte (means of metrics, barriers), the rendezvous, and what evaluation and checkpoints
need. Kinds: rows, activations, gradients (and the weights that a distributed optimizer gathers), weights (regathering),
control (numbers of all rows, order statistics).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.planning.activation_bytes import role_activations, rollout_activations
from rlhf_megatron.planning.edges import Edges
from rlhf_megatron.planning.memory import estimate
from rlhf_megatron.planning.parameters import rank_parameters
from rlhf_megatron.planning.row_lengths import lengths
from rlhf_megatron.planning.stage_memory import ELEMENT_BYTES, GB, StageMemory
from rlhf_megatron.planning.step_terms import NUMBER_BYTES, TOKEN_BYTES
from rlhf_megatron.recipe import RLRecipe, RoleSection, role_ranks, rollout_ranks
from rlhf_megatron.recipe.drafting import DRAFT
from rlhf_megatron.recipe.world_checks import layout_of
from rlhf_megatron.regather.traffic import Traffic
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.role_layout import make_layout

Backend = Literal["nccl", "gloo"]
BACKENDS: tuple[Backend, ...] = ("nccl", "gloo")
KINDS = ("rows", "activations", "gradients", "weights", "control")
OF_TOKENS = ("rows", "activations")  # as many as a step has tokens
_GRADIENT_BYTES, _VALUE_BYTES, _LABEL_BYTES, _REWARD_BYTES = 4, 4, 16, 4
_MEDIAN_BYTES = 4 * 65_536 * 8  # of algorithms.totals.kth_lowest: digits of 16 bits


@dataclasses.dataclass(frozen=True)
class HostBytes:
    """The bytes between hosts in a step, by (phase, kind), and the tokens that they are for."""

    edges: Mapping[tuple[str, str], Edges]
    tokens: float

    def of(self, phases: Iterable[str] | None = None, kinds: Iterable[str] = KINDS, tokens: float = 0.0) -> Edges:
        """Return what ``phases`` (None: all) carry of ``kinds``, in a step of so many ``tokens`` if they are given."""
        scale = tokens / self.tokens if tokens else 1.0
        chosen = [
            edges.scaled(scale if kind in OF_TOKENS else 1.0)
            for (phase, kind), edges in self.edges.items()
            if kind in kinds and (phases is None or phase in phases)
        ]
        return Edges.joined(chosen)

    @property
    def has_weights(self) -> bool:
        """True where those of a regathering are known."""
        return ("regather", "weights") in self.edges

    @property
    def phases(self) -> list[str]:
        """Those that carry something."""
        return list(dict.fromkeys(phase for (phase, _), edges in self.edges.items() if edges.total))


def host_bytes(
    recipe: RLRecipe,
    architectures: Mapping[str, Architecture],
    world: int,
    traffic: Traffic | None,
    backend: Backend = "nccl",
) -> HostBytes:
    """Return what hosts of ``cluster.gpus_per_node`` of ``world`` ranks send each other in a step.

    ``traffic`` is that of a regathering, None where it is not known. Over gloo a reduce-scatter is an all-reduce. Rows
    are taken to go from any rank that generates to any that learns; experts to be drawn alike.
    """
    rows = recipe.batch.prompts_per_step * recipe.batch.rows_per_prompt
    prompt, responses = lengths(recipe, rows)
    tokens = prompt * rows + responses.tokens
    by_exchange: dict[tuple[str, str], Edges] = {}

    def add(phase: str, kind: str, edges: Edges) -> None:
        key = phase, kind
        by_exchange[key] = Edges.joined([by_exchange[key], edges]) if key in by_exchange else edges

    add("exchange", "rows", _rows(recipe, world, rows, tokens))
    memory = estimate(recipe, architectures, world)
    for name, stages in memory.roles.items():
        section, ranks = recipe.roles[name], role_ranks(recipe, name, world)
        layout = make_layout(layout_of(recipe, section), len(ranks))
        hosts = [rank // recipe.cluster.gpus_per_node for rank in ranks]
        for phase, edges in role_activations(recipe, name, architectures[name], layout, hosts).items():
            add(phase, "activations", edges)
        if section.learns_by:
            phase = "update_critic" if name == "critic" else "update"
            add(phase, "gradients", _gradients(recipe, section, architectures[name], stages, layout, hosts, backend))
    add("generate", "activations", rollout_activations(recipe, architectures["actor"], world))
    add("logprobs", "rows", _values_elsewhere(recipe, world, tokens))
    if traffic:
        add("regather", "weights", _weights(recipe, traffic))
    for phase, edges in _control(recipe, world, rows).items():
        add(phase, "control", edges)
    return HostBytes(by_exchange, tokens)


def _rows(recipe: RLRecipe, world: int, rows: int, tokens: float) -> Edges:
    """Return each row to the first rank of a data-parallel rank of each place where it is computed, and then within
    that."""
    edges, generating = Edges(), rollout_ranks(recipe, world)
    places = {_place(recipe, name, world): name for name in _computing(recipe)}
    for name in places.values():
        ranks = role_ranks(recipe, name, world)
        layout = make_layout(layout_of(recipe, recipe.roles[name]), len(ranks))
        models = [[ranks[at] for at in group] for group in layout.groups_along("tensor", "context", "pipeline")]
        leaders = [group[0] for group in models]
        size = TOKEN_BYTES * tokens
        edges.spread(_hosts(recipe, generating), _hosts(recipe, leaders), size + _LABEL_BYTES * rows)
        for group in models:
            edges.broadcast(_hosts(recipe, group), size / len(models))
    return edges


def _values_elsewhere(recipe: RLRecipe, world: int, tokens: float) -> Edges:
    """Return logprobs of a reference and values of a critic, whose ranks or layout are not the actor's."""
    edges, actor = Edges(), _place(recipe, "actor", world)
    for name in _computing(recipe):
        if _place(recipe, name, world) != actor:
            there, here = (_hosts(recipe, role_ranks(recipe, role, world)) for role in (name, "actor"))
            edges.spread(there, here, _VALUE_BYTES * tokens)
    return edges


def _computing(recipe: RLRecipe) -> list[str]:
    """Return roles that rows are brought to; what drafts learns of the actor's."""
    return [name for name in recipe.roles_made if name not in ("reward_model", DRAFT)]


def _place(recipe: RLRecipe, name: str, world: int) -> tuple[object, ...]:
    ranks = role_ranks(recipe, name, world)
    return tuple(ranks), make_layout(layout_of(recipe, recipe.roles[name]), len(ranks))


def _gradients(
    recipe: RLRecipe, section: RoleSection, model: Architecture, stages: Sequence[StageMemory], layout: Layout,
    hosts: Sequence[int], backend: Backend,
) -> Edges:  # fmt: skip
    """Return the sums of each data-parallel group, of the experts of theirs, in all updates of a step."""
    edges, optimizer = Edges(), section.learns_by
    assert optimizer is not None
    weight_bytes = _GRADIENT_BYTES if section.adapters else ELEMENT_BYTES[recipe.dtype_of(section)]
    reduced = _GRADIENT_BYTES * (2 if backend == "gloo" or not optimizer.distributed else 1)
    of_element = (reduced + weight_bytes * optimizer.distributed) * recipe.batch.updates_per_step
    of_stage = layout.size // layout.pipeline
    for stage in stages:
        elements = stage.gradients * GB / _GRADIENT_BYTES
        whole = rank_parameters(model, layout, stage.stage)
        experts = 0.0 if section.adapters else elements * whole.experts / whole.total
        for size, groups in (
            (elements - experts, layout.groups_along("data", "context")),
            (experts, layout.expert_groups_along("data") if experts else ()),
        ):
            for group in groups:
                if group[0] // of_stage == stage.stage:
                    edges.ring([hosts[at] for at in group], size * of_element * (len(group) - 1) / len(group))
    return edges


def _weights(recipe: RLRecipe, traffic: Traffic) -> Edges:
    size, edges = ELEMENT_BYTES[recipe.rollout.dtype or recipe.model.dtype], Edges()
    for noted, by_rank in ((edges.sent, traffic.to_hosts), (edges.received, traffic.from_hosts)):
        for rank, count in by_rank.items():
            noted[rank // recipe.cluster.gpus_per_node] += size * count
    return edges


def _control(recipe: RLRecipe, world: int, rows: int) -> dict[str, Edges]:
    """Return the numbers of all rows and their rewards; medians of differences over the actor's data-parallel ranks."""
    score, logprobs = Edges(), Edges()
    generating = rollout_ranks(recipe, world)
    score.all_reduce(_hosts(recipe, generating), (NUMBER_BYTES + _REWARD_BYTES) * rows)
    if recipe.old_logprobs == "recompute":
        ranks = role_ranks(recipe, "actor", world)
        layout = make_layout(recipe.actor.layout, len(ranks))
        for group in layout.groups_along("data"):
            logprobs.all_reduce(_hosts(recipe, [ranks[at] for at in group]), _MEDIAN_BYTES)
    return {"score": score, "logprobs": logprobs}


def _hosts(recipe: RLRecipe, ranks: Iterable[int]) -> list[int]:
    return [rank // recipe.cluster.gpus_per_node for rank in ranks]
