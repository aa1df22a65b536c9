"""Megatron's config: what a model computes, from its family, and how, from the layout and the recipe."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families import FAMILIES
from rlhf_megatron.models.recompute import recompute_settings
from rlhf_megatron.recipe.memory_savings import RecomputeSection
from rlhf_megatron.recipe.role_sections import Fp8Recipe
from rlhf_megatron.topology.layout import Layout


def transformer_config(
    architecture: Architecture,
    layout: Layout,
    dtype: str,
    *,
    sequence_parallel: bool = False,
    cp_comm_type: str = "p2p",
    recompute: RecomputeSection | None = None,
    fused: bool = False,
    deterministic: bool = False,
    fp8: Fp8Recipe | None = None,
) -> TransformerConfig:
    """Return Megatron's config for ``architecture`` cut into ``layout``, computing in ``dtype``, one of torch's types
    by name.

    ``fused`` asks for Transformer Engine's kernels for rotary embeddings and activations, and for its grouped experts.
    ``deterministic`` asks for Megatron's own kernels that give the same bits each time.
    ``fp8``: how linear layers are scaled in 8 bits. Weights stay in ``dtype`` (``fp8_param`` would replace them by
    Transformer Engine's quantized tensors, which the rollout cannot share), as do embedding, norms, attention and head.

    Losses are sums over tokens that already carry their global weight (``calculate_per_token_loss``: data-parallel
    ranks are added up, never averaged), so gradients do not depend on micro-batches or on how rows fall onto ranks.
    """
    family = FAMILIES[architecture.family]
    compute_dtype: torch.dtype = getattr(torch, dtype)
    stages = [sum(map(len, chunks)) for chunks in layout.stage_chunks(architecture.layers)]
    uneven = layout.pipeline > 1 and len(set(stages)) > 1
    if architecture.cuts_sequences:
        # Megatron sends each tensor rank's own tokens to the experts, and sums gradients of whole down projections, and
        # of a delta net's norm, of whose heads each rank has some, as those of a cut sequence.
        sequence_parallel = True
    kind = TransformerConfig if architecture.latent is None else MLATransformerConfig
    return kind(
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        num_layers_in_first_pipeline_stage=stages[0] if uneven else None,
        num_layers_in_last_pipeline_stage=stages[-1] if uneven else None,
        context_parallel_size=layout.context,
        cp_comm_type=cp_comm_type,
        sequence_parallel=sequence_parallel and layout.tensor > 1,
        params_dtype=compute_dtype,
        pipeline_dtype=compute_dtype,
        bf16=compute_dtype == torch.bfloat16,
        fp16=compute_dtype == torch.float16,
        variable_seq_lengths=layout.virtual_pipeline == 1,  # the interleaved schedule would wait for shapes in a circle
        moe_token_dispatcher_type="alltoall",  # asked for by variable_seq_lengths, also without experts
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=True,
        deterministic_mode=deterministic,
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=True,
        **({"fp8": "e4m3", "fp8_recipe": fp8} if fp8 else {}),
        **recompute_settings(recompute or RecomputeSection()),
        **family.transformer_settings(architecture, layout, float32=dtype == "float32", fused=fused),
    )
