"""How much memory a recipe needs on each GPU, phase by phase. Arithmetic only; what it leaves out is named.

Not counted: fragmentation, buffers of collectives, and the kernels' workspaces, for which ``RESERVED_GB`` stands.
"""

from __future__ import annotations

import dataclasses

from rlhf_megatron.planning.model_shape import ModelShape, role_config, shape_of
from rlhf_megatron.recipe.recipe import Recipe
from rlhf_megatron.recipe.rl import RLRecipe
from rlhf_megatron.recipe.roles import (
    LayoutSection,
    OffloadSection,
    RoleSection,
    transformer_engine_can,
)
from rlhf_megatron.recipe.supervised import RewardModelingRecipe
from rlhf_megatron.recipe.world_checks import layout_of, role_ranks, rollout_ranks, stage_layers

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


def estimate(recipe: Recipe, shape: ModelShape, world_size: int) -> Estimate:
    """The memory of ``recipe`` on ``world_size`` GPUs, whose layouts have been checked."""
    roles = {
        name: _role_memory(
            recipe, section, role_shape(recipe, name, section, shape), len(role_ranks(recipe, name, world_size))
        )
        for name, section in recipe.roles_made.items()
    }
    placed = {name: set(role_ranks(recipe, name, world_size)) for name in roles}
    rollout = None
    if isinstance(recipe, RLRecipe):
        rollout = _rollout_memory(recipe, shape, world_size)
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


def role_shape(recipe: Recipe, name: str, section: RoleSection, shape: ModelShape) -> ModelShape:
    """The sizes of a role's model, given those of the recipe's: of its own folder where it is here, with its head."""
    own = shape_of(config) if (config := role_config(recipe, section, {})) else shape
    scalar = name in ("critic", "reward_model") or isinstance(recipe, RewardModelingRecipe)
    return dataclasses.replace(own, scalar_head=scalar)


def checkpoint_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Size of one checkpoint: weights and both of Adam's moments, in float32, of every role that learns."""
    learning = {name: section for name, section in recipe.roles_made.items() if section.learns_by}
    return sum(
        12.0 * _learning_parameters(section, role_shape(recipe, name, section, shape))
        for name, section in learning.items()
    )


def _learning_parameters(section: RoleSection, shape: ModelShape) -> int:
    """Those of a learning role that change: all, or its adapters'."""
    lora = section.adapters
    return shape.layers * shape.adapter_parameters(lora) if lora else shape.parameters


def export_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Size of one export: the actor's weights in model.dtype, and its adapters beside them."""
    own = role_shape(recipe, "actor", recipe.actor, shape)
    adapters = 4.0 * _learning_parameters(recipe.actor, own) if recipe.actor.lora else 0.0
    return _ELEMENT_BYTES[recipe.model.dtype] * own.parameters + adapters


def micro_batch_tokens(recipe: Recipe, section: RoleSection, gradients: bool = True) -> int:
    """Tokens of the largest micro-batch of an update or of a pass for logprobs, over the GPUs that context parallelism
    cuts it over: the budget, or a longer row (of preferences: a pair) alone."""
    budget = section.tokens_per_gpu if gradients else section.logprob_tokens_per_gpu or section.tokens_per_gpu
    alone = recipe.rows_per_response * recipe.longest_sequence
    return max(budget * layout_of(recipe, section).context, alone)


def all_logits(recipe: Recipe, section: RoleSection, shape: ModelShape) -> float:
    """GB of all logits of the largest micro-batch of an update, on each GPU of the last stage."""
    layout, size = layout_of(recipe, section), _ELEMENT_BYTES[recipe.model.dtype]
    tokens = micro_batch_tokens(recipe, section) // layout.context
    return size * tokens * shape.padded_vocabulary(layout.tensor) / layout.tensor / GB


def keeps_logits(recipe: Recipe, section: RoleSection, shape: ModelShape) -> bool:
    """Whether an update has memory for all logits of its largest micro-batch, and does not make them again."""
    return all_logits(recipe, section, shape) <= section.kept_logits


def _role_memory(recipe: Recipe, section: RoleSection, shape: ModelShape, gpus: int) -> list[StageMemory]:
    """Every pipeline stage of a role on ``gpus``."""
    layout, learning = layout_of(recipe, section), section.learns_by
    stages = stage_layers(layout, shape.layers)
    data = gpus // layout.model_gpus
    size = _ELEMENT_BYTES[recipe.model.dtype]
    tokens = micro_batch_tokens(recipe, section)
    forward_tokens = micro_batch_tokens(recipe, section, gradients=False) // layout.context
    forward_layer = forward_tokens * _layer_activations(section, shape, layout, size)
    per_stage = []
    for stage in range(layout.pipeline):
        count = shape.rank_parameters(layout.tensor, stages, stage, expert_shards=layout.expert_gpus)
        of_experts = stages[stage] * shape.expert_parameters(layout.expert_gpus)
        last = stage == layout.pipeline - 1
        gradients = optimizer = activations = logits = streamed = passing = adapters = on_host = 0.0
        lora = section.adapters
        if learning is not None and lora is not None:
            learns = stages[stage] * shape.adapter_parameters(lora)  # whole on every GPU of the stage
            gradients = 4.0 * learns
            # Adam's moments; the adapters are in float32, and their own master weights.
            optimizer = 8.0 * learns / (gpus // layout.pipeline if learning.distributed else 1)
            streamed = section.offload.streamed_optimizer * optimizer
            optimizer, passing = optimizer - streamed, min(streamed, 3.0 * _STREAMED_PIECE_BYTES)
            adapted = sum(rows * columns for rows, columns in shape.linear_layers(lora.modules)) // layout.tensor
            base = float(size * stages[stage] * adapted)
            adapters, on_host = 4.0 * learns + (0.0 if lora.offload_base else base), base if lora.offload_base else 0.0
        elif learning is not None:
            # Gradients are summed in float32. Adam keeps two moments, and master weights unless the model is float32.
            gradients, moments = 4.0 * count, 8.0 if size == 4 else 12.0
            copies, expert_copies = data * layout.context, gpus // layout.pipeline // layout.expert_gpus
            if not learning.distributed:
                copies = expert_copies = 1
            optimizer = moments * ((count - of_experts) / copies + of_experts / expert_copies)
            streamed = section.offload.streamed_optimizer * optimizer
            optimizer -= streamed
            # No parameter is cut, and the largest are the last to be streamed: the vocabulary's.
            vocabulary = moments * shape.padded_vocabulary(layout.tensor) // layout.tensor * shape.hidden / copies
            piece = vocabulary if section.offload.streamed_optimizer == 1 else 0.0
            passing = min(streamed, max(piece, _STREAMED_PIECE_BYTES) + 2 * _STREAMED_PIECE_BYTES)
        if learning is not None:
            in_flight = min(_micro_batches_in_flight(layout, stage), _most_micro_batches(recipe, tokens, data))
            activations = _stage_activations(section, shape, layout, stages[stage], tokens, size, in_flight)
            activations /= layout.context
        if learning is not None and last:
            kept = keeps_logits(recipe, section, shape)
            logits = _logit_bytes(
                shape, tokens // layout.context, layout.tensor, size, gradients=True, kept=kept, frozen=lora is not None
            )
        forward = _logit_bytes(shape, forward_tokens, layout.tensor, size, gradients=False) if last else 0.0
        parts = (
            size * count, gradients, optimizer, activations, logits, max(forward, forward_layer), streamed, passing,
            adapters, on_host,
        )  # fmt: skip
        per_stage.append(StageMemory(stage, count, section.offload, *(part / GB for part in parts)))
    return per_stage


def recomputed_layers(section: RoleSection, layout: LayoutSection, layers: int) -> int:
    """How many of a pipeline stage's ``layers`` an update computes again; Megatron counts them chunk by chunk."""
    if section.recompute.granularity != "full":
        return 0
    chunks = layout.virtual_pipeline or 1
    return chunks * min(layers // chunks, section.recompute.layers or layers)


def _micro_batches_in_flight(layout: LayoutSection, stage: int) -> float:
    """How many micro-batches' activations a stage holds at most, by the one-forward-one-backward schedule.

    With virtual stages, the interleaved one (arXiv 2104.04473, section 2.2, with the warm-up of megatron-core's
    schedules.py): its forward passes before the first backward pass are each of one chunk.
    """
    behind, chunks = layout.pipeline - stage - 1, layout.virtual_pipeline or 1
    if chunks == 1:
        return behind + 1
    return (2 * behind + (chunks - 1) * layout.pipeline + 1) / chunks


def _most_micro_batches(recipe: Recipe, tokens: int, data: int) -> int:
    """Micro-batches of one data-parallel rank in one optimizer step, if every row were as long as it may be."""
    rows = -(-recipe.batch.prompts_per_update * recipe.batch.rows_per_prompt // data)
    return max(1, -(-rows * recipe.rows_per_response * recipe.longest_sequence // tokens))


def _sequence_parts(section: RoleSection, shape: ModelShape, layout: LayoutSection) -> int:
    """Over how many GPUs norms are cut; with experts always over the tensor-parallel ones."""
    return layout.tensor if section.sequence_parallel or shape.experts else 1


def _layer_activations(section: RoleSection, shape: ModelShape, layout: LayoutSection, size: int) -> float:
    """Bytes per token that one decoder layer keeps for its backward pass, in the manner of arXiv 2205.05198, section 4.

    Outside the tensor-parallel parts: the inputs and outputs of both norms (4 hidden). Inside: query, key, value and
    the attention's output; and of the gated feed-forward layer gate, up and their product, and where the activation is
    not fused, also silu(gate) and a copy of up. Attention itself keeps nothing of the order of tokens squared. Experts,
    taken to be equally busy, keep the same of each token that they get, and its input and output.
    """
    outside = 4 * shape.hidden / _sequence_parts(section, shape, layout)
    fused = section.transformer_implementation != "local" and transformer_engine_can(layout.context, size == 4)
    kept = 3 if fused else 5  # Transformer Engine is taken to be installed
    feed_forward = kept * shape.feed_forward
    if shape.experts:
        parts = layout.expert_gpus // layout.expert
        feed_forward = shape.experts_per_token * (kept * shape.expert_feed_forward + 2 * shape.hidden * parts)
    inside = (2 * shape.query + 2 * shape.key_value + feed_forward) / layout.tensor
    return size * (outside + inside)


def _stage_activations(
    section: RoleSection,
    shape: ModelShape,
    layout: LayoutSection,
    layers: int,
    tokens: int,
    size: int,
    in_flight: float,
) -> float:
    """Bytes that one stage keeps; layers that are recomputed keep their input, and one of them at a time is whole."""
    whole = _layer_activations(section, shape, layout, size)
    if section.recompute.granularity != "full":  # selective: fused attention has nothing large to give up
        return tokens * layers * whole * in_flight
    recomputed = recomputed_layers(section, layout, layers)
    layer_input = size * shape.hidden / _sequence_parts(section, shape, layout)
    kept = (layers - recomputed) * whole + recomputed * layer_input
    return tokens * (kept * in_flight + whole)


def _logit_bytes(
    shape: ModelShape, tokens: int, tensor: int, size: int, *, gradients: bool, kept: bool = False, frozen: bool = False
) -> float:
    """A block of logits, or all where they are ``kept``; the tokens that are read, their gradient in float32 and,
    unless it is ``frozen``, the gradient of the output layer."""
    if shape.scalar_head:
        return 0.0
    columns = shape.padded_vocabulary(tensor) // tensor
    pieces = max(1, _LOGIT_BLOCK_BYTES // (size * tokens * _LOGIT_PIECE))
    block = size * tokens * (columns if kept else min(columns, pieces * _LOGIT_PIECE))
    of_layer = 0 if frozen else size * columns * shape.hidden
    learning = 4 * tokens * shape.hidden + of_layer if gradients else 0
    return float(block + size * tokens * shape.hidden + learning)


def _rollout_memory(recipe: RLRecipe, shape: ModelShape, world_size: int) -> RolloutMemory:
    section = recipe.rollout
    tensor, size = section.layout.tensor, _ELEMENT_BYTES[section.dtype or recipe.model.dtype]
    weights = size * shape.rank_parameters(tensor, [shape.layers], 0, repeated_heads=True) / GB
    shared = size * _shared_parameters(recipe, shape, world_size) / GB
    if section.quantization:  # a copy in 8 bits of all linear layers but routers and experts
        weights += shape.layers * shape.layer_parameters(tensor, repeated_heads=True) / GB
    beside_cache = weights - shared + ROLLOUT_ACTIVATIONS_GB
    if section.kv_cache_gb is not None:
        cache = section.kv_cache_gb
        share = beside_cache + cache
    else:
        share = section.gpu_memory_utilization * recipe.cluster.gpu_memory_gb
        cache = max(0.0, share - beside_cache)
    heads = max(1, shape.key_value_heads // tensor)
    tokens = int(cache * GB // (2 * shape.layers * heads * shape.head_dim * size))
    replicas = len(rollout_ranks(recipe, world_size)) // tensor
    return RolloutMemory(replicas, weights, shared, cache, share, tokens, tokens // recipe.longest_sequence)


def _shared_parameters(recipe: RLRecipe, shape: ModelShape, world_size: int) -> int:
    """Of the rollout's parameters on a GPU, those in the actor's memory; on the GPU with the fewest, which limits all.

    Where both cut tensors alike they are what the GPU has of the actor, but neither experts, which vLLM stacks, nor the
    fused matrices of attention where vLLM repeats heads. Else they are norms, which do not count.
    """
    layout, rollout = layout_of(recipe, recipe.actor), recipe.rollout
    if recipe.why_weights_are_copied or layout.tensor != rollout.layout.tensor:
        return 0
    if role_ranks(recipe, "actor", world_size) != rollout_ranks(recipe, world_size):
        return 0
    stages, tensor = stage_layers(layout, shape.layers), layout.tensor
    apart = shape.expert_parameters(tensor)
    if shape.key_value_heads < tensor:
        apart += (shape.query + 2 * shape.key_value) // tensor * (shape.hidden + shape.qkv_bias)
    return min(shape.rank_parameters(tensor, stages, stage) - count * apart for stage, count in enumerate(stages))
