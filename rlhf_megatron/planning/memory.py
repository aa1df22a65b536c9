"""How much memory a recipe needs on each GPU, phase by phase. Arithmetic only; what it leaves out is named.

Not counted: fragmentation, buffers of collectives, and the kernels' workspaces, for which ``RESERVED_GB`` stands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.kv_cache import key_value_bytes
from rlhf_megatron.planning.parameters import (
    adapted_parameters,
    adapter_parameters,
    model_parameters,
    rank_parameters,
    rollout_parameters,
    shareable_parameters,
    stage_layer_indices,
)
from rlhf_megatron.recipe.recipe import Recipe
from rlhf_megatron.recipe.rl import RLRecipe
from rlhf_megatron.recipe.roles import OffloadSection, RoleSection, transformer_engine_can
from rlhf_megatron.recipe.world_checks import layout_of, role_ranks, rollout_ranks
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.role_layout import make_layout

GB = 2**30
TIGHT = 0.95  # of the memory, beyond which what the estimate leaves out may decide
RESERVED_GB = 2.0  # CUDA context, NCCL buffers, workspaces of cuBLAS and attention
SLEEPING_GB = 2.0  # what a sleeping vLLM keeps: its CUDA graphs and their memory
ROLLOUT_ACTIVATIONS_GB = 2.0  # vLLM's own activations and sampling buffers, within its share
_STREAMED_PIECE_BYTES = 1 << 30  # as in roles.streaming
_LOGIT_BLOCK_BYTES, _LOGIT_PIECE = 256 << 20, 4096  # as in kernels.linear_logprob
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """GB on each GPU of one pipeline stage of a role."""

    stage: int
    parameters: int
    offload: OffloadSection
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    logprobs: float
    streamed: float
    """Of the optimizer's state, in host memory."""
    passing: float
    """What of it is on the GPU at a time, in the optimizer's step."""
    adapters: float = 0.0
    """What learns in place of the weights, and those without it where they are on the GPU."""
    base_on_host: float = 0.0
    """Weights without adapters in host memory."""

    @property
    def held(self) -> float:
        """Weights, gradients and optimizer together, as in an update."""
        return self.weights + self.adapters + self.gradients + self.optimizer

    @property
    def resident(self) -> float:
        """What of them stays on the GPU in every phase."""
        leaves = self.offload
        away = self.weights * leaves.parameters + self.gradients * leaves.gradients + self.optimizer * leaves.optimizer
        return self.held - away

    @property
    def forward(self) -> float:
        """What a pass for logprobs adds to what is resident."""
        return self.logprobs + (self.weights if self.offload.parameters else 0.0)

    @property
    def update(self) -> float:
        """Everything at once in an update: activations in the backward pass, or what is streamed in the step."""
        return self.held + max(self.activations + self.logits, self.passing)

    @property
    def peak(self) -> float:
        """Everything at once, in an update; without gradients, in a pass for logprobs."""
        return max(self.update, self.held + self.logprobs)


@dataclasses.dataclass(frozen=True)
class RolloutMemory:
    """GB on each GPU of the rollout, and what fits into its cache; ``shared`` of the weights are the actor's memory."""

    replicas: int
    weights: float
    shared: float
    cache: float
    share: float
    cache_tokens: int
    longest_sequences: int


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory of a whole recipe: each role's stages, and for each phase what the fullest GPU needs."""

    roles: dict[str, list[StageMemory]]
    rollout: RolloutMemory | None
    phases: dict[str, float]


def estimate(recipe: Recipe, architectures: Mapping[str, Architecture], world_size: int) -> Estimate:
    """The memory of ``recipe``, whose roles have ``architectures``, on ``world_size`` GPUs that its layouts fit."""
    roles = {
        name: _role_memory(recipe, section, architectures[name], len(role_ranks(recipe, name, world_size)))
        for name, section in recipe.roles_made.items()
    }
    placed = {name: set(role_ranks(recipe, name, world_size)) for name in roles}
    rollout = None
    if isinstance(recipe, RLRecipe):
        rollout = _rollout_memory(recipe, architectures["actor"], world_size)
        placed["rollout"] = set(rollout_ranks(recipe, world_size))
    together = {frozenset(name for name in placed if rank in placed[name]) for rank in range(world_size)}
    phases = [
        _phases(recipe, {name: roles[name] for name in roles if name in here}, rollout if "rollout" in here else None)
        for here in together
    ]
    return Estimate(roles, rollout, {phase: max(each[phase] for each in phases) for phase in phases[0]})


def _phases(recipe: Recipe, roles: dict[str, list[StageMemory]], rollout: RolloutMemory | None) -> dict[str, float]:
    """What a GPU with these roles, and rollout if there is some on it, needs in each phase; the roles' fullest stages
    are taken to meet on one GPU."""
    fullest = {name: max(stage.resident for stage in stages) for name, stages in roles.items()}
    resident = RESERVED_GB + sum(fullest.values())
    updates = (resident - fullest[name] + max(stage.update for stage in stages) for name, stages in roles.items())
    update = max(updates, default=resident)
    if not isinstance(recipe, RLRecipe):
        return {"update": update}
    awake = rollout.share if rollout else 0.0
    sleeps = recipe.rollout.sleep and roles and not recipe.rollout_is_ahead
    asleep = min(awake, SLEEPING_GB) if sleeps else awake
    forward = max((stage.forward for stages in roles.values() for stage in stages), default=0.0)
    return {
        "generate": resident + awake + recipe.regather.buffer_mb / 1024,
        "logprobs": resident + asleep + forward,
        "update": update + asleep,
    }


def checkpoint_bytes(recipe: Recipe, architectures: Mapping[str, Architecture]) -> float:
    """Size of one checkpoint: weights and both of Adam's moments, in float32, of every role that learns."""
    learning = {name: section for name, section in recipe.roles_made.items() if section.learns_by}
    return sum(12.0 * _learning_parameters(section, architectures[name]) for name, section in learning.items())


def _learning_parameters(section: RoleSection, architecture: Architecture) -> int:
    """Those of a learning role that change: all, or its adapters'."""
    lora = section.adapters
    return adapter_parameters(architecture, lora) if lora else model_parameters(architecture)


def export_bytes(recipe: Recipe, architectures: Mapping[str, Architecture]) -> float:
    """Size of one export: the actor's weights in model.dtype, and its adapters beside them."""
    actor = architectures["actor"]
    adapters = 4.0 * _learning_parameters(recipe.actor, actor) if recipe.actor.lora else 0.0
    return _ELEMENT_BYTES[recipe.model.dtype] * model_parameters(actor) + adapters


def micro_batch_tokens(recipe: Recipe, section: RoleSection, gradients: bool = True) -> int:
    """Tokens of the largest micro-batch of an update or of a pass for logprobs, over the GPUs that context parallelism
    cuts it over: the budget, or a longer row (of preferences: a pair) alone."""
    budget = section.tokens_per_gpu if gradients else section.logprob_tokens_per_gpu or section.tokens_per_gpu
    alone = recipe.rows_per_response * recipe.longest_sequence
    return max(budget * layout_of(recipe, section).context, alone)


def all_logits(recipe: Recipe, section: RoleSection, architecture: Architecture) -> float:
    """GB of all logits of the largest micro-batch of an update, on each GPU of the last stage."""
    layout, size = layout_of(recipe, section), _ELEMENT_BYTES[recipe.model.dtype]
    tokens = micro_batch_tokens(recipe, section) // layout.context
    return size * tokens * architecture.padded_vocabulary(layout.tensor) / layout.tensor / GB


def keeps_logits(recipe: Recipe, section: RoleSection, architecture: Architecture) -> bool:
    """Whether an update has memory for all logits of its largest micro-batch, and does not make them again."""
    return all_logits(recipe, section, architecture) <= section.kept_logits


def _role_memory(recipe: Recipe, section: RoleSection, architecture: Architecture, gpus: int) -> list[StageMemory]:
    """Every pipeline stage of a role on ``gpus``."""
    layout, learning = make_layout(layout_of(recipe, section), gpus), section.learns_by
    size = _ELEMENT_BYTES[recipe.model.dtype]
    tokens = micro_batch_tokens(recipe, section)
    forward_tokens = micro_batch_tokens(recipe, section, gradients=False) // layout.context
    forward_layer = forward_tokens * _layer_activations(section, architecture, layout, size)
    per_stage = []
    for stage, layers in enumerate(layout.stage_layers(architecture.layers)):
        held = rank_parameters(architecture, layout, stage)
        last = stage == layout.pipeline - 1
        activations = logits = 0.0
        state = _LearningState()
        if learning is not None:
            state = _learning_state(section, architecture, layout, stage, size)
            in_flight = min(_micro_batches_in_flight(layout, stage), _most_micro_batches(recipe, tokens, layout.data))
            activations = _stage_activations(section, architecture, layout, layers, tokens, size, in_flight)
            activations /= layout.context
        if learning is not None and last:
            kept, frozen = keeps_logits(recipe, section, architecture), section.adapters is not None
            logits = _logit_bytes(
                architecture, tokens // layout.context, layout.tensor, size, gradients=True, kept=kept, frozen=frozen
            )
        forward = _logit_bytes(architecture, forward_tokens, layout.tensor, size, gradients=False) if last else 0.0
        parts = (
            size * held.total, state.gradients, state.optimizer, activations, logits, max(forward, forward_layer),
            state.streamed, state.passing, state.adapters, state.base_on_host,
        )  # fmt: skip
        per_stage.append(StageMemory(stage, held.total, section.offload, *(part / GB for part in parts)))
    return per_stage


@dataclasses.dataclass(frozen=True)
class _LearningState:
    """Bytes of what learning adds to the weights on each GPU of a stage; the fields are those of StageMemory."""

    gradients: float = 0.0
    optimizer: float = 0.0
    streamed: float = 0.0
    passing: float = 0.0
    adapters: float = 0.0
    base_on_host: float = 0.0


def _learning_state(
    section: RoleSection, architecture: Architecture, layout: Layout, stage: int, size: int
) -> _LearningState:
    """Gradients and Adam's state of a stage whose weights have ``size`` bytes, or those of its adapters."""
    learning, lora, share = section.learns_by, section.adapters, section.offload.streamed_optimizer
    assert learning is not None
    gpus = layout.size // layout.pipeline
    if lora is not None:
        layers = stage_layer_indices(architecture, layout, stage)
        learns = adapter_parameters(architecture, lora, layers)  # whole on every GPU of the stage
        # Adam's moments; the adapters are in float32, and their own master weights.
        optimizer = 8.0 * learns / (gpus if learning.distributed else 1)
        streamed = share * optimizer
        base = float(size * adapted_parameters(architecture, lora, layers, layout.tensor))
        return _LearningState(
            gradients=4.0 * learns,
            optimizer=optimizer - streamed,
            streamed=streamed,
            passing=min(streamed, 3.0 * _STREAMED_PIECE_BYTES),
            adapters=4.0 * learns + (0.0 if lora.offload_base else base),
            base_on_host=base if lora.offload_base else 0.0,
        )
    # Gradients are summed in float32. Adam keeps two moments, and master weights unless the model is float32.
    held, moments = rank_parameters(architecture, layout, stage), 8.0 if size == 4 else 12.0
    copies, expert_copies = layout.data * layout.context, gpus // (layout.expert * layout.expert_parts)
    if not learning.distributed:
        copies = expert_copies = 1
    optimizer = moments * ((held.total - held.experts) / copies + held.experts / expert_copies)
    streamed = share * optimizer
    # No parameter is cut, and the largest are the last to be streamed: the vocabulary's.
    vocabulary = moments * architecture.padded_vocabulary(layout.tensor) // layout.tensor * architecture.hidden / copies
    piece = vocabulary if share == 1 else 0.0
    return _LearningState(
        gradients=4.0 * held.total,
        optimizer=optimizer - streamed,
        streamed=streamed,
        passing=min(streamed, max(piece, _STREAMED_PIECE_BYTES) + 2 * _STREAMED_PIECE_BYTES),
    )


def recomputed_layers(section: RoleSection, layout: Layout, layers: int) -> int:
    """How many of a pipeline stage's ``layers`` an update computes again; Megatron counts them chunk by chunk."""
    if section.recompute.granularity != "full":
        return 0
    chunks = layout.virtual_pipeline
    return chunks * min(layers // chunks, section.recompute.layers or layers)


def _micro_batches_in_flight(layout: Layout, stage: int) -> float:
    """How many micro-batches' activations a stage holds at most, by the one-forward-one-backward schedule.

    With virtual stages, the interleaved one (arXiv 2104.04473, section 2.2, with the warm-up of megatron-core's
    schedules.py): its forward passes before the first backward pass are each of one chunk.
    """
    behind, chunks = layout.pipeline - stage - 1, layout.virtual_pipeline
    if chunks == 1:
        return behind + 1
    return (2 * behind + (chunks - 1) * layout.pipeline + 1) / chunks


def _most_micro_batches(recipe: Recipe, tokens: int, data: int) -> int:
    """Micro-batches of one data-parallel rank in one optimizer step, if every row were as long as it may be."""
    rows = -(-recipe.batch.prompts_per_update * recipe.batch.rows_per_prompt // data)
    return max(1, -(-rows * recipe.rows_per_response * recipe.longest_sequence // tokens))


def _sequence_parts(section: RoleSection, architecture: Architecture, layout: Layout) -> int:
    """Over how many GPUs norms are cut; with experts always over the tensor-parallel ones."""
    return layout.tensor if section.sequence_parallel or architecture.experts else 1


def _layer_activations(section: RoleSection, architecture: Architecture, layout: Layout, size: int) -> float:
    """Bytes per token that one decoder layer keeps for its backward pass, in the manner of arXiv 2205.05198, section 4.

    Outside the tensor-parallel parts: the inputs and outputs of both norms (4 hidden). Inside: query, key, value and
    the attention's output; and of the gated feed-forward layer gate, up and their product, and where the activation is
    not fused, also silu(gate) and a copy of up. Attention itself keeps nothing of the order of tokens squared. Experts,
    taken to be equally busy, keep the same of each token that they get, and its input and output.
    """
    a, experts = architecture, architecture.experts
    outside = 4 * a.hidden / _sequence_parts(section, a, layout)
    fused = section.transformer_implementation != "local" and transformer_engine_can(layout.context, size == 4)
    kept = 3 if fused else 5  # Transformer Engine is taken to be installed
    feed_forward = kept * a.feed_forward
    if experts is not None:
        feed_forward = experts.chosen * (kept * experts.feed_forward + 2 * a.hidden * layout.expert_parts)
    inside = (2 * a.heads * a.head_dim + 2 * a.key_value_heads * a.head_dim + feed_forward) / layout.tensor
    return size * (outside + inside)


def _stage_activations(
    section: RoleSection,
    architecture: Architecture,
    layout: Layout,
    layers: int,
    tokens: int,
    size: int,
    in_flight: float,
) -> float:
    """Bytes that one stage keeps; layers that are recomputed keep their input, and one of them at a time is whole."""
    whole = _layer_activations(section, architecture, layout, size)
    if section.recompute.granularity != "full":  # selective: fused attention has nothing large to give up
        return tokens * layers * whole * in_flight
    recomputed = recomputed_layers(section, layout, layers)
    layer_input = size * architecture.hidden / _sequence_parts(section, architecture, layout)
    kept = (layers - recomputed) * whole + recomputed * layer_input
    return tokens * (kept * in_flight + whole)


def _logit_bytes(
    architecture: Architecture,
    tokens: int,
    tensor: int,
    size: int,
    *,
    gradients: bool,
    kept: bool = False,
    frozen: bool = False,
) -> float:
    """A block of logits, or all where they are ``kept``; the tokens that are read, their gradient in float32 and,
    unless it is ``frozen``, the gradient of the output layer."""
    if architecture.head == "scalar":
        return 0.0
    columns = architecture.padded_vocabulary(tensor) // tensor
    pieces = max(1, _LOGIT_BLOCK_BYTES // (size * tokens * _LOGIT_PIECE))
    block = size * tokens * (columns if kept else min(columns, pieces * _LOGIT_PIECE))
    of_layer = 0 if frozen else size * columns * architecture.hidden
    learning = 4 * tokens * architecture.hidden + of_layer if gradients else 0
    return float(block + size * tokens * architecture.hidden + learning)


def _rollout_memory(recipe: RLRecipe, architecture: Architecture, world_size: int) -> RolloutMemory:
    section = recipe.rollout
    tensor, size = section.layout.tensor, _ELEMENT_BYTES[section.dtype or recipe.model.dtype]
    held = rollout_parameters(architecture, tensor, section.layout.expert_parallel)
    weights = size * held.total / GB
    shared = size * _shared_parameters(recipe, architecture, world_size) / GB
    if section.quantization:  # a copy in 8 bits of all linear layers but routers and experts
        weights += held.dense / GB
    beside_cache = weights - shared + ROLLOUT_ACTIVATIONS_GB
    if section.kv_cache_gb is not None:
        cache = section.kv_cache_gb
        share = beside_cache + cache
    else:
        share = section.gpu_memory_utilization * recipe.cluster.gpu_memory_gb
        cache = max(0.0, share - beside_cache)
    tokens = int(cache * GB // key_value_bytes(architecture, size, tensor))
    replicas = len(rollout_ranks(recipe, world_size)) // tensor
    return RolloutMemory(replicas, weights, shared, cache, share, tokens, tokens // recipe.longest_sequence)


def _shared_parameters(recipe: RLRecipe, architecture: Architecture, world_size: int) -> int:
    """Of the rollout's parameters on a GPU, those in the actor's memory; on the GPU with the fewest, which limits all.

    Where both cut tensors alike these are the ``shareable_parameters``; else they are norms, which do not count.
    """
    ranks = role_ranks(recipe, "actor", world_size)
    layout = make_layout(recipe.actor.layout, len(ranks))
    if recipe.why_weights_are_copied or layout.tensor != recipe.rollout.layout.tensor:
        return 0
    if ranks != rollout_ranks(recipe, world_size):
        return 0
    return min(shareable_parameters(architecture, layout, stage) for stage in range(layout.pipeline))
