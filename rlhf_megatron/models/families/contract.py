"""The interface of a model family: all that the rest of the library asks of one (docs/new_model.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.description import Architecture, LayerKind
from rlhf_megatron.models.rectangles import Block, Implementation, Shapes
from rlhf_megatron.models.stacked import Stacked
from rlhf_megatron.topology.layout import Layout

if TYPE_CHECKING:
    from rlhf_megatron.models.rotary import Rotary

ReadConfig = Callable[[Path, Mapping[str, Any]], Architecture]  # as Family.read


class Family(Protocol):
    """Everything particular to one Hugging Face ``model_type``; pure, and free of torch until a model is built."""

    @property
    def classes(self) -> str:
        """The prefix of the names of transformers' classes, such as "Qwen2Moe"."""
        ...

    @property
    def language_class(self) -> str:
        """The name of transformers' class of the language model; "": by ``classes``, as the others."""
        ...

    @property
    def fields(self) -> FamilyFields:
        """The fields of config.json that are this family's; what nobody knows is refused before ``read``."""
        ...

    # ---- description

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """Describe the model of ``config``, whose fields are checked; raises ModelError, with ``path`` of the file."""
        ...

    def tensor_shapes(self, architecture: Architecture) -> Shapes:
        """Return every tensor of the Hugging Face checkpoint and its shape, in the model's order; tied embeddings
        once."""
        ...

    def stacked_tensors(self, architecture: Architecture) -> Mapping[str, Stacked]:
        """Return those tensors of the checkpoint that stack several of ``tensor_shapes``, by their names there."""
        ...

    @property
    def initial_values(self) -> Mapping[str, float]:
        """Initial values of tensors with random weights, by the end of the name, where other families have others."""
        ...

    @property
    def joint_adapters(self) -> bool:
        """True if PEFT reads the adapters of a layer's experts joined alone, and not those of single experts."""
        ...

    @property
    def predicts(self) -> bool:
        """True if checkpoints may have a layer for multi-token prediction in DeepSeek-V3's form."""
        ...

    # ---- trainer

    def layer_spec(
        self, architecture: Architecture, kind: LayerKind, implementation: Implementation, rotary: Rotary
    ) -> Any:
        """Return Megatron's ModuleSpec of a decoder layer of ``kind``; its attention turns heads by ``rotary``."""
        ...

    def transformer_settings(
        self, architecture: Architecture, layout: Layout, *, float32: bool, fused: bool
    ) -> dict[str, Any]:
        """Return those arguments of Megatron's TransformerConfig that say what the model computes.

        ``float32``: weights are of that type. ``fused``: layers are Transformer Engine's.
        """
        ...

    def megatron_blocks(
        self, architecture: Architecture, layout: Layout, position: int, implementation: Implementation
    ) -> list[Block]:
        """Return the rectangles that the rank at ``position`` of a Megatron layout holds; data-parallel ranks hold the
        same.

        All ranks together hold every element of ``tensor_shapes``.
        """
        ...

    # ---- rollout

    @property
    def has_rollout_table(self) -> bool:
        """True if ``rollout_blocks`` is written down; otherwise the blocks are learned from vLLM's own loader."""
        ...

    def rollout_blocks(
        self, architecture: Architecture, tensor: int, tensor_rank: int, expert_parallel: bool, layers: Iterable[int]
    ) -> list[Block]:
        """Return the rectangles that tensor rank ``tensor_rank`` of ``tensor`` of one vLLM replica holds of
        ``layers``."""
        ...

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """Return the reason why vLLM would compute another model from the same config.json; None: it computes this
        one."""
        ...

    def derived_parameters(self, architecture: Architecture) -> Sequence[str]:
        """Return the names of vLLM's parameters that it makes of others after loading, and that no tensor is written
        into."""
        ...

    # ---- cost

    def multiplied_weights(self, architecture: Architecture, kind: LayerKind) -> int:
        """Return weights of a decoder layer of ``kind`` that one token is multiplied with."""
        ...

    def attention_flops(
        self, architecture: Architecture, kind: LayerKind, rows: Sequence[float], causal: bool
    ) -> float:
        """Return operations of one layer's forward pass that are no products with weights, over ``rows`` of these
        lengths.

        Without ``causal`` every pair of tokens counts, also those that the mask takes away.
        """
        ...

    def cached_elements(self, architecture: Architecture, kind: LayerKind, tensor: int) -> int:
        """Return the numbers that vLLM's KV cache keeps of one token in one layer, on each of ``tensor`` ranks."""
        ...

    def cached_tokens(self, architecture: Architecture, kind: LayerKind, tokens: float) -> float:
        """Return tokens that vLLM's KV cache keeps in one layer of a row of ``tokens``."""
        ...
