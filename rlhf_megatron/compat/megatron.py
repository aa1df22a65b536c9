"""Patches of megatron-core: places that ask for global process groups, and modules that cannot do what is needed.

Megatron's global ``parallel_state`` is never initialised here, so a missing process group raises instead of silently
using another model's. What still reads it although a role's own groups were passed is patched below.
"""

from __future__ import annotations

from typing import Any

import torch

from rlhf_megatron.compat import megatron_cpu
from rlhf_megatron.compat.megatron_names import KNOWN
from rlhf_megatron.compat.patches import NONE_FOUND, patch


def install() -> None:
    """Patch megatron-core for this process; call it before its models and optimizers are imported. Idempotent."""
    megatron_cpu.install()
    make_scratch_memory()
    tie_embeddings_over_own_groups()
    build_norms_for_sequence_parallelism()
    forget_routed_probabilities()
    leave_tokens_in_order()


@patch(
    "megatron-core",
    **KNOWN,
    why="scratch memory of sequence parallelism depends on no layout, but only initialize_model_parallel makes it",
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/6307",
)
def make_scratch_memory() -> None:
    """Make Megatron's global memory buffer without its global process groups."""
    from megatron.core import parallel_state

    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


@patch(
    "megatron-core",
    **KNOWN,
    why="tied embeddings of the last pipeline stage take their replica id from the global data-parallel rank",
    upstream="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3673",
)
def tie_embeddings_over_own_groups() -> None:
    """Have tied embeddings take their replica id from the role's own group."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

    original = LanguageModule.tie_embeddings_and_output_weights_state_dict

    def tie(self: Any, state: dict, output_key: str, embedding_key: str, metadata: dict | None = None) -> None:
        metadata = metadata or {}
        if not self.post_process or self.pre_process:
            original(self, state, output_key, embedding_key, metadata)
            return
        group = metadata["dp_cp_group"]
        state[output_key] = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.shared_embedding_or_output_weight(),
            key=embedding_key,
            replica_id=(1, 0, group.rank()),
            allow_shape_mismatch=True,
            tp_group=self.tp_group,
            dp_cp_group=group,
        )

    LanguageModule.tie_embeddings_and_output_weights_state_dict = tie


@patch(
    "megatron-core",
    **KNOWN,
    why="the norm of layers without Transformer Engine refuses sequence parallelism, which needs no more than a mark",
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/1448",
)
def build_norms_for_sequence_parallelism() -> None:
    """Have megatron-core make ``make_norm`` where it would take torch's norm."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    WrappedTorchNorm.__new__ = make_norm


@patch(
    "megatron-core",
    **KNOWN,
    why="a dispatcher keeps the probabilities of its last tokens, and with them the graph that made them: the input of "
    "every layer that is computed again, and its gradient, until the next step",
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/3221",
)
def forget_routed_probabilities() -> None:
    """Have a layer of experts keep nothing of its graph once its tokens are back in their order."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    original = MoEAlltoAllTokenDispatcher.combine_postprocess

    def combine_postprocess(self: Any, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = original(self, permutated_local_input_tokens)
        self.probs = None
        return output

    MoEAlltoAllTokenDispatcher.combine_postprocess = combine_postprocess


@patch(
    "megatron-core",
    **KNOWN,
    why="where one rank has all experts a dispatcher sorts tokens into the order that they have, and copies them twice "
    "in each pass",
    upstream=NONE_FOUND,
)
def leave_tokens_in_order() -> None:
    """Have dispatchers without other ranks copy no tokens from their order to the same."""
    import megatron.core.transformer.moe.token_dispatcher as dispatching

    dispatcher: Any = dispatching.MoEAlltoAllTokenDispatcher
    initialize, sort = dispatcher.__init__, dispatching.sort_chunks_by_idxs

    def without_order(self: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, *arguments, **named)
        if self.tp_size * self.ep_size == 1:
            self.sort_input_by_local_experts = self.restore_output_by_local_experts = None

    def sort_if_needed(
        values: torch.Tensor, sizes: torch.Tensor, order: torch.Tensor | None, probs: Any = None, fused: bool = False
    ) -> tuple[torch.Tensor, Any]:
        return (values, probs) if order is None else sort(values, sizes, order, probs=probs, fused=fused)

    dispatcher.__init__, dispatching.sort_chunks_by_idxs = without_order, sort_if_needed


class ZeroCentredRMSNorm(torch.nn.RMSNorm):
    """An RMSNorm whose factor is 1 + its weight, computed in float32 as Transformer Engine's is."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """See torch.nn.RMSNorm."""
        factor = 1 + self.weight.float()
        return torch.nn.functional.rms_norm(values.float(), self.normalized_shape, factor, self.eps).type_as(values)


def make_norm(_: Any, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> torch.nn.Module:
    """Make a norm, without a bias, whose weight says whether its gradient is of a part of the sequence.

    Gradients of weights with this mark are summed over the tensor-parallel ranks.

    Raises:
        NotImplementedError: neither RMSNorm nor LayerNorm, or a LayerNorm whose weight is counted from 1.
    """
    match config.normalization, config.layernorm_zero_centered_gamma:
        case "RMSNorm", False:
            norm: torch.nn.Module = torch.nn.RMSNorm(hidden_size, eps=eps)
        case "RMSNorm", True:
            norm = ZeroCentredRMSNorm(hidden_size, eps=eps)
        case "LayerNorm", False:
            norm = torch.nn.LayerNorm(hidden_size, eps=eps, bias=False)
        case normalization, _:
            raise NotImplementedError(f"{normalization}, zero-centred, in layers without Transformer Engine")
    norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[union-attr]
    return norm
