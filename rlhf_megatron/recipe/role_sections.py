"""The sections of the roles: ``actor``, ``reference``, ``critic``, ``reward_model``, each with its layout and
adapters."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from rlhf_megatron.recipe.memory_savings import OffloadSection, RecomputeSection
from rlhf_megatron.recipe.optimizer import OptimizerSection
from rlhf_megatron.recipe.placement import Ranks
from rlhf_megatron.recipe.section import LARGEST_MEMORY_GB, Section
from rlhf_megatron.untrusted import shown

Dtype = Literal["float32", "bfloat16", "float16"]
Fp8Recipe = Literal["blockwise"]


class LayoutSection(Section):
    """Degrees of parallelism of a role."""

    tensor: int = Field(default=1, gt=0)
    """Shards every layer."""
    pipeline: int = Field(default=1, gt=0)
    """Pipeline stages."""
    virtual_pipeline: int | None = Field(default=None, gt=1)
    """Interleaved chunks per stage."""
    context: int = Field(default=1, gt=0)
    """Shards every sequence."""
    expert: int = Field(default=1, gt=0)
    """Spreads experts over a stage's tensor x context x data GPUs."""
    expert_tensor: int | None = Field(default=None, gt=0)
    """Default: tensor; 1: whole experts."""
    data: int | None = Field(default=None, gt=0)
    """Default: the role's remaining GPUs."""
    first_stage_layers: int | None = Field(default=None, gt=0)
    """For uneven splits."""
    last_stage_layers: int | None = Field(default=None, gt=0)
    """Likewise."""

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


class RoleSection(Section):
    """A model that computes: where, in which layout, how much at a time."""

    ranks: Ranks = "all"
    """all, "0-3", "0,2-3" or "node0:0-3;node1:0-3". Roles on disjoint GPUs train concurrently."""
    layout: LayoutSection | None = None
    """Degrees of parallelism; default: the actor's."""
    sequence_parallel: bool = False
    """Shard norms and dropout along the sequence; always on with experts."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """Context parallel attention: ring, all-gather, or Ulysses."""
    tokens_per_gpu: Annotated[int, Field(gt=0)] | Literal["auto"]
    """Packed micro-batch; a longer row runs alone. auto: found at the start from free memory (docs/layouts.md)."""
    logprob_tokens_per_gpu: int | None = Field(default=None, gt=0)
    """The same without gradients; default: tokens_per_gpu."""
    recompute: RecomputeSection = RecomputeSection()
    """Activation recomputation."""
    offload: OffloadSection = OffloadSection()
    """Move state to host memory between phases."""
    transformer_implementation: Literal["auto", "local", "transformer_engine"] = "auto"
    """auto: Transformer Engine on GPUs, if installed; local: Megatron's."""

    @field_validator("tokens_per_gpu", mode="before")
    @classmethod
    def _tokens_are_a_number_or_auto(cls, value: Any) -> Any:
        """Refuse in one line what pydantic would refuse in one for each of both types."""
        if value != "auto" and (type(value) is not int or value <= 0):
            raise ValueError(f"must be a number of tokens above 0, or auto; it is {shown(repr(value), 40)}")
        return value

    @property
    def update_tokens(self) -> int:
        """tokens_per_gpu as a number, which a recipe with auto has once it is planned (planning.token_budgets)."""
        assert self.tokens_per_gpu != "auto", "micro-batches are not planned yet"
        return self.tokens_per_gpu

    @property
    def forward_tokens(self) -> int:
        """The budget of passes without gradients."""
        return self.logprob_tokens_per_gpu or self.update_tokens

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

    @property
    def fp8_recipe(self) -> Fp8Recipe | None:
        """Scaling of linear layers that multiply in 8 bits; None: they multiply in the role's type."""
        return None


def transformer_engine_can(context: int, float32: bool, shares_prompts: bool = False) -> bool:
    """Return whether Transformer Engine has layers for a model.

    In float32 its attention has neither context parallelism nor sequences with more keys than queries.
    """
    return not float32 or (context == 1 and not shares_prompts)


class LearningRoleSection(RoleSection):
    """A model that is trained."""

    optimizer: OptimizerSection
    """AdamW and its schedule, in optimizer steps."""

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


LinearLayer = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj",
    "input_linear", "output_linear", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "w1", "w3", "w2",
    "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
]  # fmt: skip


class LoraSection(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): W + scale x B A, where only B and A are trained."""

    rank: int = Field(gt=0, le=2**16)
    """Columns of B, rows of A."""
    alpha: float | None = Field(default=None, gt=0)
    """Scale is alpha / rank; default: rank."""
    rank_stabilized: bool = False
    """Scale is alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
    target_modules: Literal["all-linear"] | list[LinearLayer] = "all-linear"
    """Names in the checkpoint, of experts too."""
    path: str | None = None
    """PEFT adapter to start from, of the same rank and modules."""
    offload_base: bool = False
    """Keep base weights on the host."""

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
    """Low-rank adapters (docs/lora.md)."""
    kept_logits_gb: float = Field(default=0.0, ge=0, le=LARGEST_MEMORY_GB)
    """For a micro-batch's logits (tokens x vocabulary / tensor, 2 bytes each in bfloat16); else computed twice."""
    shared_prompts: bool = False
    """Compute a prefix that rows of a micro-batch share once; reference and critic too."""
    fp8: Fp8Recipe | None = None
    """Decoder layers in e4m3; dense models, Hopper GPUs (docs/rollout.md)."""

    @model_validator(mode="after")
    def _fp8_can_be(self) -> ActorSection:
        if self.fp8 and self.lora:
            raise ValueError(f"fp8={self.fp8}: not for adapters in this version; leave out fp8 or lora")
        if self.fp8 and self.transformer_implementation == "local":
            raise ValueError(f"fp8={self.fp8} needs Transformer Engine: leave out transformer_implementation=local")
        return self

    @model_validator(mode="after")
    def _adapters_are_merged_at_once(self) -> ActorSection:
        if self.lora and self.optimizer.overlap_param_gather:
            raise ValueError("optimizer.overlap_param_gather=True: adapters are merged after each step, leave it out")
        return self

    @property
    def adapters(self) -> LoraSection | None:
        """See RoleSection."""
        return self.lora

    @property
    def kept_logits(self) -> float:
        """See RoleSection."""
        return self.kept_logits_gb

    @property
    def fp8_recipe(self) -> Fp8Recipe | None:
        """See RoleSection."""
        return self.fp8


class FrozenRoleSection(RoleSection):
    """A frozen model."""

    dtype: Dtype | None = None
    """Default: model.dtype."""
    path: str | None = None
    """Folder, or name on the hub; default: model.path."""
    revision: str | None = None
    """As model.revision."""

    @property
    def weights_folder(self) -> str | None:
        """See RoleSection."""
        return self.path


class CriticSection(LearningRoleSection):
    """Value model: a decoder with a scalar head, trained beside the actor."""

    dtype: Dtype | None = None
    """Default: model.dtype."""
    path: str | None = None
    """With the actor's tokenizer; default: model.path."""
    revision: str | None = None
    """As model.revision."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps train the critic alone."""
    value_clip: float | None = Field(default=0.5, gt=0)
    """Clip range around the old value; null: none."""

    @property
    def weights_folder(self) -> str | None:
        """See RoleSection."""
        return self.path


class RewardModelSection(RoleSection):
    """Frozen sequence classifier with one label; its scores are rewards."""

    dtype: Dtype | None = None
    """Default: model.dtype."""
    weight: float = 1.0
    """Of its score, added to section reward's."""
    path: str
    """Weights and tokenizer, as of loop reward_modeling's export."""
    revision: str | None = None
    """As model.revision."""
    tokenizer: str | None = None
    """Default: path."""
    chat_template: str | None = None
    """Jinja file in place of its tokenizer's."""

    @property
    def weights_folder(self) -> str | None:
        """See RoleSection."""
        return self.path
