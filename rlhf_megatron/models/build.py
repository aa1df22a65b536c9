"""Builds Megatron models from an architecture and a layout. Weights are filled in by ``hf_files``."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from rlhf_megatron.errors import UserError
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.attention import PackedAttention
from rlhf_megatron.models.heads import ScalarHead
from rlhf_megatron.models.self_attention import StackedSelfAttention
from rlhf_megatron.models.weight_map import Implementation
from rlhf_megatron.recipe.roles import transformer_engine_can
from rlhf_megatron.topology.layout import Layout


def choose_implementation(wanted: str, role: str, layout: Layout, dtype: str) -> Implementation:
    """Whose layers a model has: with "auto" Transformer Engine's where they are there, with a GPU, and they can.

    Raises UserError, which names the key in the section of ``role``, where they are ``wanted`` and cannot be had.
    """
    key = f"{role}.transformer_implementation"
    can = transformer_engine_can(layout.context, dtype == "float32")
    if wanted == "transformer_engine" and not can:
        raise UserError(
            f"{key}: Transformer Engine has no context parallelism in float32; set it to auto, model.dtype to "
            f"bfloat16, or {role}.layout.context to 1"
        )
    available = False
    if torch.cuda.is_available():
        from megatron.core.extensions import transformer_engine

        available = transformer_engine.HAVE_TE
    if wanted == "transformer_engine" and not available:
        raise UserError(f"{key} needs Transformer Engine; it is not installed here, or there is no GPU: set it to auto")
    return "transformer_engine" if available and can and wanted != "local" else "local"


def _layer_spec(architecture: Architecture, implementation: Implementation) -> ModuleSpec:
    spec: Any
    experts = architecture.experts.count if architecture.experts else None
    if implementation == "transformer_engine":
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts,
            moe_grouped_gemm=experts is not None,
            qk_layernorm=architecture.query_key_norm,
            use_te_activation_func=experts is None,
        )
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=experts, qk_layernorm=architecture.query_key_norm, normalization="RMSNorm"
        )
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
    spec.submodules.self_attention.module = StackedSelfAttention
    return spec


@contextlib.contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Inside, if ``wanted``, torch takes kernels that give the same bits each time, and warns where it has none."""
    if not wanted:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def build_model(
    architecture: Architecture,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    implementation: Implementation,
    seed: int,
) -> list[GPTModel]:
    """One rank's part of the model on its device, in ``config.params_dtype``, with weights not yet filled in.

    It is in one piece, or in the chunks of virtual pipeline stages, from the model's front to its end. The random
    states of torch stay as they were; Megatron's tracker, used only by dropout, is seeded.
    """
    # Notices about names and layouts inside Megatron, at each model, with nothing to do for the user.
    for quiet in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
        logging.getLogger(f"megatron.core.{quiet}").setLevel(logging.ERROR)
    cuda_devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    if implementation == "transformer_engine" and config.params_dtype == torch.float32:
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    with torch.random.fork_rng(devices=cuda_devices):
        model_parallel_cuda_manual_seed(
            seed, tp_rank=groups.tp.rank(), ep_rank=groups.ep.rank(), etp_rank=groups.expt_tp.rank()
        )
        chunks = [
            _build_chunk(architecture, config, groups, implementation, chunk)
            for chunk in range(config.virtual_pipeline_model_parallel_size or 1)
        ]
    device = torch.device("cuda", cuda_devices[0]) if cuda_devices else torch.device("cpu")
    chunks = [chunk.to(device) for chunk in chunks]
    return [chunk.to(config.params_dtype) for chunk in chunks] if config.params_dtype != torch.float32 else chunks


def sum_gradients_in_products(model: torch.nn.Module) -> None:
    """Has Transformer Engine's layers add a weight's gradient to Megatron's float32 sum within the matrix product that
    makes it: no gradient in bfloat16 in between, which takes memory, time to add, and digits.

    Megatron's config has a switch for it, but that needs NVIDIA's apex for the layers that are Megatron's own.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def _build_chunk(
    architecture: Architecture,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    implementation: Implementation,
    chunk: int,
) -> GPTModel:
    chunks = config.virtual_pipeline_model_parallel_size or 1
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(architecture, implementation),
        vocab_size=architecture.padded_vocabulary(groups.tp.size()),
        max_sequence_length=architecture.max_positions,
        pre_process=groups.pp.rank() == 0 and chunk == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1 and chunk == chunks - 1,
        share_embeddings_and_output_weights=architecture.tied_embeddings and architecture.head == "language",
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        rope_scaling=architecture.rope_scaling_factor is not None,
        rope_scaling_factor=architecture.rope_scaling_factor or 1.0,
        parallel_output=True,
        pg_collection=groups,
        vp_stage=chunk if chunks > 1 else None,
    )
    if architecture.head == "scalar" and model.post_process:
        model.output_layer = ScalarHead(config, groups.tp)
    return model
