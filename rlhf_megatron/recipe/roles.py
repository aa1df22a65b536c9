"""The sections of the roles: `actor`, `reference`, `critic`, `reward_model`, each with its layout and memory."""

from __future__ import annotations

import math
from typing import Literal, get_args

from pydantic import Field, model_validator

from rlhf_megatron.recipe.placement import Ranks
from rlhf_megatron.recipe.section import LARGEST_FLOAT, LARGEST_MEMORY_GB, Section


class LayoutSection(Section):
    """Degrees of parallelism of one role."""

    tensor: int = Field(default=1, gt=0)
    """Tensor parallelism: every layer is cut over this many GPUs."""
    pipeline: int = Field(default=1, gt=0)
    """Pipeline parallelism: layers are dealt out to this many stages."""
    virtual_pipeline: int | None = Field(default=None, gt=1)
    """Chunks of layers on each pipeline stage, which the stages take in turns: less idle time, more messages."""
    context: int = Field(default=1, gt=0)
    """Context parallelism: every sequence is cut over this many GPUs."""
    expert: int = Field(default=1, gt=0)
    """Expert parallelism: the experts of a layer are dealt out to this many GPUs, which tokens travel to. They are some
    of the tensor x context x data GPUs of a pipeline stage, not more GPUs."""
    expert_tensor: int | None = Field(default=None, gt=0)
    """Tensor parallelism of the experts; default: that of the rest. 1 keeps each expert whole."""
    data: int | None = Field(default=None, gt=0)
    """Data parallelism; default: what the other degrees leave of the role's GPUs."""
    first_stage_layers: int | None = Field(default=None, gt=0)
    """Layers of the first pipeline stage, where the layers do not divide evenly or its embedding weighs."""
    last_stage_layers: int | None = Field(default=None, gt=0)
    """Layers of the last pipeline stage."""

    @model_validator(mode="after")
    def _stages_exist(self) -> LayoutSection:
        staged = ("virtual_pipeline", "first_stage_layers", "last_stage_layers")
        given = [key for key in staged if getattr(self, key) is not None]
        if given and self.pipeline == 1:
            raise ValueError(f"{given[0]} needs pipeline of 2 or more; pipeline is 1, leave it out")
        return self

    @property
    def expert_gpus(self) -> int:
        """GPUs that hold one copy of a layer's experts."""
        return self.expert * (self.expert_tensor or self.tensor)

    @property
    def model_gpus(self) -> int:
        """GPUs that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context


class RecomputeSection(Section):
    """Activations that are computed again in the backward pass instead of being kept."""

    granularity: Literal["none", "selective", "full"] = "none"
    """none; selective: attention only; full: whole layers."""
    layers: int | None = Field(default=None, gt=0)
    """With full: how many layers per stage, or per chunk of one with layout.virtual_pipeline; default: all."""

    @model_validator(mode="after")
    def _layers_need_full(self) -> RecomputeSection:
        if self.layers is not None and self.granularity != "full":
            raise ValueError(f"layers={self.layers} needs granularity full; it is {self.granularity}")
        return self


class OffloadSection(Section):
    """State that moves to host memory while the role does not compute."""

    parameters: bool = False
    """The weights."""
    gradients: bool = False
    """The gradient buffers."""
    optimizer: bool = False
    """Master weights and moments."""
    streamed_optimizer: float = Field(default=0.0, ge=0, le=1)
    """Share of master weights and moments that lives in host memory for good and passes through the GPU in pieces while
    the role takes a step: room for activations, for a step longer by that share of what the link needs."""


class OptimizerSection(Section):
    """AdamW, and its learning rate over the optimizer steps of the run."""

    learning_rate: float = Field(gt=0)
    """The highest learning rate."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """The rate that decay ends at."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the rate after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the rate rises linearly."""
    decay_steps: int | None = Field(default=None, gt=0)
    """The optimizer step at which decay ends; default: the run's last."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay; norms and biases have none."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam's decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Adam's decay of the second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Adam's term against division by zero."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient over all parameters; 0 is off."""
    skip_grad_norm: float | None = Field(default=None, gt=0)
    """A step whose gradient has a larger norm than this, before it is cut, is a spike and is skipped."""
    distributed: bool = True
    """Cut the optimizer's state over data-parallel ranks."""

    @model_validator(mode="after")
    def _first_step_fits(self) -> OptimizerSection:
        if self.learning_rate > LARGEST_FLOAT * (1 - self.beta1):
            raise ValueError(
                f"learning_rate={self.learning_rate:g}: Adam's first step, learning_rate / (1 - beta1), is beyond "
                "float32; lower it"
            )
        return self

    @model_validator(mode="after")
    def _weights_remain(self) -> OptimizerSection:
        if self.learning_rate * self.weight_decay >= 1:
            raise ValueError(
                f"weight_decay={self.weight_decay:g} x learning_rate={self.learning_rate:g} takes all of each weight "
                "away in a step; lower one"
            )
        return self

    @model_validator(mode="after")
    def _schedule_falls(self) -> OptimizerSection:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate={self.min_learning_rate} is above learning_rate={self.learning_rate}")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps={self.decay_steps} must be above warmup_steps={self.warmup_steps}")
        falling = self.changed("min_learning_rate", "decay_steps") if self.schedule == "constant" else []
        if falling:
            key = falling[0]
            raise ValueError(f"{key}={getattr(self, key)} is for schedules that fall; it is constant, leave it out")
        return self


class RoleSection(Section):
    """A model that computes: where, in which layout, how much at a time."""

    ranks: Ranks = "all"
    """GPUs of the role: all, "0-3", "0,2-3", or "node0:0-3;node1:0-3". On GPUs of their own roles learn at once."""
    layout: LayoutSection | None = None
    """Degrees of parallelism; default: the actor's."""
    sequence_parallel: bool = False
    """With tensor parallelism: cut norms and dropout over the sequence too. Models with experts always do."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """With context parallelism, how attention sees the whole sequence: keys and values go round in a ring (p2p), are
    gathered at once (all_gather), or heads are exchanged for tokens (a2a, known as Ulysses)."""
    tokens_per_gpu: int = Field(gt=0)
    """Tokens of one packed micro-batch on each GPU; the knob for memory and speed. A longer sequence goes alone."""
    logprob_tokens_per_gpu: int | None = Field(default=None, gt=0)
    """The same for passes without gradients; default: tokens_per_gpu."""
    recompute: RecomputeSection = RecomputeSection()
    """Activations to compute again."""
    offload: OffloadSection = OffloadSection()
    """State that moves to host memory between phases."""
    transformer_implementation: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers of Transformer Engine, or Megatron's own in plain PyTorch; auto: the former on GPUs that have it."""

    @property
    def weights_folder(self) -> str | None:
        """The folder of the role's own weights; None: it has the model's."""
        return None

    @property
    def learns_by(self) -> OptimizerSection | None:
        """The optimizer; None: the role is frozen."""
        return None

    @property
    def adapters(self) -> LoraSection | None:
        """The low-rank adapters that learn in place of the weights; None: there are none."""
        return None

    @property
    def kept_logits(self) -> float:
        """Memory for the logits of a micro-batch, GB of 2^30 bytes; 0: they are made twice."""
        return 0.0


def transformer_engine_can(context: int, float32: bool) -> bool:
    """Returns whether Transformer Engine has layers for a model: not with context parallelism in float32."""
    return context == 1 or not float32


class LearningRoleSection(RoleSection):
    """A model that is trained."""

    optimizer: OptimizerSection
    """Optimizer of the role."""

    @property
    def learns_by(self) -> OptimizerSection | None:
        """See RoleSection."""
        return self.optimizer

    @model_validator(mode="after")
    def _only_a_distributed_optimizer_is_streamed(self) -> LearningRoleSection:
        if self.offload.streamed_optimizer and not self.optimizer.distributed:
            share = self.offload.streamed_optimizer
            raise ValueError(
                f"offload.streamed_optimizer={share:g} needs optimizer.distributed: leave out distributed=false"
            )
        return self


LinearLayer = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraSection(Section):
    """Low-rank adaptation (LoRA, arXiv 2106.09685): of each adapted weight W only B and A of W + scale x B A learn."""

    rank: int = Field(gt=0, le=2**16)
    """Columns of B and rows of A."""
    alpha: float | None = Field(default=None, gt=0)
    """The scale is alpha / rank; default: rank, for a scale of 1."""
    rank_stabilized: bool = False
    """Make the scale alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""
    target_modules: Literal["all-linear"] | list[LinearLayer] = "all-linear"
    """Linear layers with adapters, by their Hugging Face names: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj,
    down_proj; all-linear: all of these. Those of experts cannot have any."""
    path: str | None = None
    """A folder with an adapter in PEFT's format to start from, of the same rank and modules; default: a new one, with
    which the model is as it was."""
    offload_base: bool = False
    """Keep the weights without adapters in host memory: they are read after each optimizer step and for the reference,
    and otherwise take as much of the GPU as the adapted layers do."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    @property
    def modules(self) -> tuple[str, ...]:
        """The adapted layers, in one order."""
        wanted = self.target_modules
        return tuple(name for name in get_args(LinearLayer) if wanted == "all-linear" or name in wanted)

    @model_validator(mode="after")
    def _something_is_adapted(self) -> LoraSection:
        if not self.modules:
            raise ValueError("target_modules names no layer; name some, or leave it out for all")
        return self


class ActorSection(LearningRoleSection):
    """The model that is trained."""

    layout: LayoutSection = LayoutSection()
    """Degrees of parallelism."""
    lora: LoraSection | None = None
    """Train low-rank adapters instead of the weights; the reference is then the model without them."""
    kept_logits_gb: float = Field(default=0.0, ge=0, le=LARGEST_MEMORY_GB)
    """Memory in which an update keeps the logits of a micro-batch until its backward pass, if all of them fit: tokens x
    vocabulary / layout.tensor, 2 bytes each in bfloat16. Otherwise they are made twice, a block at a time."""

    @property
    def adapters(self) -> LoraSection | None:
        """See RoleSection."""
        return self.lora

    @property
    def kept_logits(self) -> float:
        """See RoleSection."""
        return self.kept_logits_gb


class FrozenRoleSection(RoleSection):
    """A model that is not trained, such as the reference."""

    path: str | None = None
    """Folder of its weights; default: model.path."""

    @property
    def weights_folder(self) -> str | None:
        """See RoleSection."""
        return self.path


class CriticSection(LearningRoleSection):
    """The value model: a decoder with a scalar head, which learns beside the actor."""

    path: str | None = None
    """Folder that it starts from: a reward model, or a language model that gets a new head; default: model.path. It
    must share the actor's tokenizer."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start of the run in which the critic alone learns."""
    value_clip: float | None = Field(default=0.5, gt=0)
    """Distance that a value may move from what it was before the step and still be pulled further; null: no bound."""

    @property
    def weights_folder(self) -> str | None:
        """See RoleSection."""
        return self.path


class RewardModelSection(RoleSection):
    """A frozen sequence classification model with one label, whose scores are rewards."""

    weight: float = 1.0
    """Factor of its score, to which the reward of the section reward is added (rule none: nothing)."""
    path: str
    """Folder of its weights and tokenizer, such as an export of loop reward_modeling."""
    tokenizer: str | None = None
    """Folder of its tokenizer, or a sentencepiece .model file; default: path. If it differs from the actor's, responses
    are decoded and encoded again."""
    chat_template: str | None = None
    """A jinja file that replaces the tokenizer's chat template, as data.chat_template does for the actor's."""

    @property
    def weights_folder(self) -> str | None:
        """See RoleSection."""
        return self.path
