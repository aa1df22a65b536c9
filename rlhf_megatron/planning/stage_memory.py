"""Memory of one role on each GPU of its pipeline stages: weights, gradients, optimizer, activations and logits."""

from __future__ import annotations

import dataclasses

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.planning.activation_memory import largest_layer, stage_activations
from rlhf_megatron.planning.parameters import (
    adapted_parameters,
    rank_parameters,
    stage_adapters,
    stage_layer_indices,
)
from rlhf_megatron.recipe.memory_savings import OffloadSection
from rlhf_megatron.recipe.recipe import Recipe
from rlhf_megatron.recipe.role_sections import RoleSection
from rlhf_megatron.recipe.world_checks import layout_of
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.role_layout import make_layout

GB = 2**30
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STREAMED_PIECE_BYTES = 1 << 30  # as in roles.streaming
_REMAINDER_ROOM = 10.0  # bytes of a number that is widened or narrowed: in full, and what is in between
_LOGIT_BLOCK_BYTES, _LOGIT_PIECE = 256 << 20, 4096  # as in kernels.linear_logprob


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
    """Optimizer state in host memory."""
    stream_buffer: float
    """Part of it that is on the GPU at a time, in the optimizer's step, and of moments that are widened for it."""
    adapters: float = 0.0
    """Low-rank adapters, and the weights without them where these are on the GPU."""
    base_on_host: float = 0.0
    """Weights without adapters in host memory."""
    fp8: float = 0.0
    """Weights of linear layers in 8 bits, and their transposes, while passes of an update run."""

    @property
    def model_states(self) -> float:
        """Weights, gradients and optimizer together, as in an update."""
        return self.weights + self.adapters + self.gradients + self.optimizer

    @property
    def resident(self) -> float:
        """The model states that stay on the GPU in every phase."""
        leaves = self.offload
        away = self.weights * leaves.parameters + self.gradients * leaves.gradients + self.optimizer * leaves.optimizer
        return self.model_states - away

    @property
    def forward(self) -> float:
        """Memory that a pass for logprobs adds to what is resident."""
        transposed = self.fp8 / 2  # which only a backward pass reads
        return self.logprobs + self.fp8 - transposed + (self.weights if self.offload.parameters else 0.0)

    @property
    def update(self) -> float:
        """Everything at once in an update: activations in the backward pass, or what is streamed in the step."""
        return self.model_states + max(self.activations + self.logits + self.fp8, self.stream_buffer)

    @property
    def peak(self) -> float:
        """Everything at once, in an update; without gradients, in a pass for logprobs."""
        return max(self.update, self.model_states + self.logprobs + self.fp8 / 2)


def micro_batch_tokens(recipe: Recipe, section: RoleSection, gradients: bool = True) -> int:
    """Return tokens of the largest micro-batch of an update or of a pass for logprobs, over the GPUs that context
    parallelism cuts it over: the budget, or a longer row (of preferences: a pair) alone."""
    budget = section.update_tokens if gradients else section.forward_tokens
    alone = recipe.rows_per_response * recipe.longest_sequence
    return max(budget * layout_of(recipe, section).context, alone)


def all_logits(recipe: Recipe, section: RoleSection, architecture: Architecture) -> float:
    """Return GB of all logits of the largest micro-batch of an update, on each GPU of the last stage."""
    layout, size = layout_of(recipe, section), ELEMENT_BYTES[recipe.dtype_of(section)]
    tokens = micro_batch_tokens(recipe, section) // layout.context
    return size * tokens * architecture.padded_vocabulary(layout.tensor) / layout.tensor / GB


def keeps_logits(recipe: Recipe, section: RoleSection, architecture: Architecture) -> bool:
    """Return whether an update has memory for all logits of its largest micro-batch, and does not make them again."""
    return all_logits(recipe, section, architecture) <= section.kept_logits


def repeated_keys(recipe: Recipe, section: RoleSection, tokens: int) -> float:
    """Return the keys of shared prompts that attention repeats for each token of a micro-batch of ``tokens``: prompts
    are taken to be as long as they may be, and responses half as long."""
    if not recipe.shares_prompts(section):
        return 0.0
    prompt = recipe.data.max_prompt_length
    response = max(1.0, (recipe.longest_sequence - prompt) / 2)
    rows = min(recipe.batch.rows_per_prompt, max(1.0, (tokens - prompt) / response))
    return (rows - 1) * prompt / (prompt + rows * response)


def role_memory(recipe: Recipe, section: RoleSection, architecture: Architecture, gpus: int) -> list[StageMemory]:
    """Return the memory of every pipeline stage of a role on ``gpus``."""
    layout, learning = make_layout(layout_of(recipe, section), gpus), section.learns_by
    size = ELEMENT_BYTES[recipe.dtype_of(section)]
    tokens = micro_batch_tokens(recipe, section)
    forward_tokens = micro_batch_tokens(recipe, section, gradients=False) // layout.context
    longest = recipe.longest_sequence
    per_stage = []
    for stage in range(layout.pipeline):
        held = rank_parameters(architecture, layout, stage)
        last = stage == layout.pipeline - 1
        activations = logits = 0.0
        state = _LearningState()
        if learning is not None:
            state = _learning_state(section, architecture, layout, stage, size)
            in_flight = min(_micro_batches_in_flight(layout, stage), _most_micro_batches(recipe, tokens, layout.data))
            activations = stage_activations(
                section, architecture, layout, stage, tokens // layout.context, longest, size, in_flight,
                repeated_keys(recipe, section, tokens),
            )  # fmt: skip
        if learning is not None and last:
            kept, frozen = keeps_logits(recipe, section, architecture), section.adapters is not None
            logits = _logit_bytes(
                architecture, tokens // layout.context, layout.tensor, size, gradients=True, kept=kept, frozen=frozen
            )
        forward = _logit_bytes(architecture, forward_tokens, layout.tensor, size, gradients=False) if last else 0.0
        repeated = repeated_keys(recipe, section, forward_tokens)
        forward_layer = forward_tokens * largest_layer(section, architecture, layout, stage, size, longest, repeated)
        parts = (
            size * held.total, state.gradients, state.optimizer, activations, logits, max(forward, forward_layer),
            state.streamed, state.stream_buffer, state.adapters, state.base_on_host,
            2 * held.dense if section.fp8_recipe else 0,
        )  # fmt: skip
        per_stage.append(StageMemory(stage, held.total, section.offload, *(part / GB for part in parts)))
    return per_stage


@dataclasses.dataclass(frozen=True)
class _LearningState:
    """Bytes of what learning adds to the weights on each GPU of a stage; the fields are those of StageMemory."""

    gradients: float = 0.0
    optimizer: float = 0.0
    streamed: float = 0.0
    stream_buffer: float = 0.0
    adapters: float = 0.0
    base_on_host: float = 0.0


def _learning_state(
    section: RoleSection, architecture: Architecture, layout: Layout, stage: int, size: int
) -> _LearningState:
    """Return gradients and Adam's state of a stage whose weights have ``size`` bytes, or those of its adapters."""
    learning, lora, share = section.learns_by, section.adapters, section.offload.streamed_optimizer
    assert learning is not None
    gpus = layout.size // layout.pipeline
    if lora is not None:
        layers = stage_layer_indices(architecture, layout, stage)
        # Whole on every GPU of the stage, but for those of other GPUs' experts.
        dense, experts = stage_adapters(architecture, lora, layers, layout.expert)
        trainable = dense + experts
        # Adam's moments; the adapters are in float32, and their own master weights.
        optimizer = moments_bytes(section) * trainable
        if learning.distributed:
            optimizer = moments_bytes(section) * (dense / gpus + experts / (gpus // layout.expert))
        streamed = share * optimizer
        base = float(size * adapted_parameters(architecture, lora, layers, layout))
        return _LearningState(
            gradients=4.0 * trainable,
            optimizer=optimizer - streamed,
            streamed=streamed,
            stream_buffer=min(streamed, 3.0 * _STREAMED_PIECE_BYTES),
            adapters=4.0 * trainable + (0.0 if lora.offload_base else base),
            base_on_host=base if lora.offload_base else 0.0,
        )
    # Gradients are summed in float32. Adam keeps two moments, and master weights unless the model is float32.
    held = rank_parameters(architecture, layout, stage)
    master = 2.0 if learning.master_remainders else 4.0 if size < 4 else 0.0
    state_bytes = moments_bytes(section) + master
    copies, expert_copies = layout.data * layout.context, gpus // (layout.expert * layout.expert_parts)
    if not learning.distributed:
        copies = expert_copies = 1
    optimizer = state_bytes * ((held.total - held.experts) / copies + held.experts / expert_copies)
    streamed = share * optimizer
    # No parameter is cut, and the largest are the last to be streamed: the vocabulary's.
    vocabulary = architecture.padded_vocabulary(layout.tensor) // layout.tensor * architecture.hidden / copies
    piece = state_bytes * vocabulary if share == 1 else 0.0
    widened = 8.0 - moments_bytes(section) + (_REMAINDER_ROOM if learning.master_remainders else 0.0)
    widened *= max(vocabulary, _STREAMED_PIECE_BYTES / 12)
    return _LearningState(
        gradients=4.0 * held.total,
        optimizer=optimizer - streamed,
        streamed=streamed,
        stream_buffer=min(streamed, max(piece, _STREAMED_PIECE_BYTES) + 2 * _STREAMED_PIECE_BYTES)
        + min(optimizer, widened),
    )


def moments_bytes(section: RoleSection) -> float:
    """Return the bytes of both of Adam's moments of one parameter, between steps."""
    assert section.learns_by is not None
    return 2.0 * ELEMENT_BYTES[section.learns_by.state_dtype]


def recomputed_layers(section: RoleSection, layout: Layout, layers: int) -> int:
    """Return how many of a pipeline stage's ``layers`` an update recomputes; Megatron counts them chunk by chunk."""
    if section.recompute.granularity != "full":
        return 0
    chunks = layout.virtual_pipeline
    return chunks * min(layers // chunks, section.recompute.layers or layers)


def _micro_batches_in_flight(layout: Layout, stage: int) -> float:
    """Return most micro-batches whose activations a stage holds at a time, by the one-forward-one-backward schedule.

    With virtual stages, the interleaved one (arXiv 2104.04473, section 2.2, with the warm-up of megatron-core's
    schedules.py): its forward passes before the first backward pass are each of one chunk.
    """
    behind, chunks = layout.pipeline - stage - 1, layout.virtual_pipeline
    if chunks == 1:
        return behind + 1
    return (2 * behind + (chunks - 1) * layout.pipeline + 1) / chunks


def _most_micro_batches(recipe: Recipe, tokens: int, data: int) -> int:
    """Return micro-batches of one data-parallel rank in one optimizer step, if every row were as long as it may be."""
    rows = -(-recipe.batch.prompts_per_update * recipe.batch.rows_per_prompt // data)
    return max(1, -(-rows * recipe.rows_per_response * recipe.longest_sequence // tokens))


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
    """Return a block of logits, or all where they are ``kept``; the tokens that are read, their gradient in float32
    and, unless it is ``frozen``, the gradient of the output layer."""
    if architecture.head == "scalar":
        return 0.0
    columns = architecture.padded_vocabulary(tensor) // tensor
    pieces = max(1, _LOGIT_BLOCK_BYTES // (size * tokens * _LOGIT_PIECE))
    block = size * tokens * (columns if kept else min(columns, pieces * _LOGIT_PIECE))
    of_layer = 0 if frozen else size * columns * architecture.hidden
    learning = 4 * tokens * architecture.hidden + of_layer if gradients else 0
    return float(block + size * tokens * architecture.hidden + learning)
