"""The sections ``recompute`` and ``offload`` of a role: memory of a GPU that is saved for time or memory of the
host."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_megatron.recipe.section import Section

RecomputedModule = Literal["core_attn", "mlp", "moe", "shared_experts"]
KEPT_MODULES = ("layernorm", "mla_up_proj", "moe_act", "gdn_norm_out")  # Megatron's other modules


class RecomputeSection(Section):
    """Activations recomputed in the backward pass."""

    granularity: Literal["none", "selective", "full"] = "none"
    """selective: modules; full: whole layers."""
    modules: list[RecomputedModule] = Field(default=["core_attn"])
    """With selective, of every layer, as Megatron's recompute_modules (docs/layouts.md)."""
    layers: int | None = Field(default=None, gt=0)
    """full: layers per stage or virtual chunk; default: all."""

    @field_validator("modules", mode="before")
    @classmethod
    def _outputs_are_kept(cls, value: Any) -> Any:
        """Refuse modules whose outputs Megatron discards and restores."""
        discarded = next((name for name in KEPT_MODULES if isinstance(value, list) and name in value), None)
        if discarded:
            raise ValueError(
                f"{discarded}: Megatron restores its output by C++ that each machine compiles as a run starts; not in "
                "this version, leave it out"
            )
        return value

    @model_validator(mode="after")
    def _layers_need_full(self) -> RecomputeSection:
        if self.layers is not None and self.granularity != "full":
            raise ValueError(f"layers={self.layers} needs granularity full; it is {self.granularity}")
        return self

    @model_validator(mode="after")
    def _modules_need_selective(self) -> RecomputeSection:
        if self.changed("modules") and self.granularity != "selective":
            raise ValueError(f"modules={self.modules} needs granularity selective; it is {self.granularity}")
        if not self.modules:
            raise ValueError("modules names none; name some, or leave it out for core_attn")
        if {"moe", "shared_experts"} <= set(self.modules):
            raise ValueError("modules: moe is the whole layer of experts, shared ones too; leave out shared_experts")
        return self

    @property
    def selected(self) -> tuple[RecomputedModule, ...]:
        """The modules that are recomputed by themselves."""
        return tuple(self.modules) if self.granularity == "selective" else ()


class OffloadSection(Section):
    """State in host memory while the role does not compute."""

    parameters: bool = False
    """Weights."""
    gradients: bool = False
    """Gradient buffers."""
    optimizer: bool = False
    """Master weights and moments."""
    streamed_optimizer: float = Field(default=0.0, ge=0, le=1)
    """Share of these kept on the host, streamed through the GPU at updates."""
