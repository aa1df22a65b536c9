"""Builds Megatron models from an architecture and a layout. Weights are filled in by ``weight_source``."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from rlhf_megatron.errors import UserError
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.eagle3_layer import FeatureInput
from rlhf_megatron.models.families import FAMILIES
from rlhf_megatron.models.heads import ScalarHead
from rlhf_megatron.models.prediction import PredictionInput
from rlhf_megatron.models.rotary import Rotary
from rlhf_megatron.models.rotary_table import rotary_tables
from rlhf_megatron.models.sublayers import scale_embeddings
from rlhf_megatron.models.weight_map import Implementation
from rlhf_megatron.recipe.role_sections import transformer_engine_can
from rlhf_megatron.topology.layout import Layout


def choose_implementation(wanted: str, role: str, layout: Layout, dtype: str, shares_prompts: bool) -> Implementation:
    """Choose a model's layers: with "auto" Transformer Engine's where they are there, with a GPU, and they can.

    Raises UserError, which names the key in the section of ``role``, where they are ``wanted`` and cannot be had.
    """
    key = f"{role}.transformer_implementation"
    can = transformer_engine_can(layout.context, dtype == "float32", shares_prompts)
    if wanted == "transformer_engine" and not can:
        what, change = "context parallelism", f"{role}.layout.context to 1"
        if layout.context == 1:
            what, change = "shared prompts", "actor.shared_prompts to false"
        raise UserError(
            f"{key}: Transformer Engine has no {what} in float32; set it to auto, model.dtype to bfloat16, or {change}"
        )
    available = False
    if torch.cuda.is_available():
        from megatron.core.extensions import transformer_engine

        available = transformer_engine.HAVE_TE
    if wanted == "transformer_engine" and not available:
        raise UserError(f"{key} needs Transformer Engine; it is not installed here, or there is no GPU: set it to auto")
    return "transformer_engine" if available and can and wanted != "local" else "local"


@contextlib.contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Have torch take, inside, if ``wanted``, kernels that give the same bits each time, and warn where it has none."""
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
    """Return one rank's part of the model on its device, in ``config.params_dtype``, with weights not yet filled in.

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


def _build_chunk(
    architecture: Architecture,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    implementation: Implementation,
    chunk: int,
) -> GPTModel:
    chunks = config.virtual_pipeline_model_parallel_size or 1
    stage = chunk if chunks > 1 else None
    predicts = architecture.head == "prediction"  # with the embeddings and the output layer of another model
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layer_specs(architecture, config, groups, implementation, stage),
        vocab_size=groups.tp.size() if predicts else architecture.padded_vocabulary(groups.tp.size()),
        max_sequence_length=architecture.max_positions,
        pre_process=groups.pp.rank() == 0 and chunk == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1 and chunk == chunks - 1,
        share_embeddings_and_output_weights=architecture.tied_embeddings and architecture.head == "language",
        position_embedding_type="none",  # attention has its own (``rotary``)
        parallel_output=True,
        pg_collection=groups,
        vp_stage=stage,
    )
    if predicts:
        model.embedding, model.output_layer = PredictionInput(config), None
    elif architecture.head == "draft":
        model.embedding = FeatureInput(config, len(architecture.auxiliary_layers))
    elif model.pre_process:
        scale_embeddings(model.embedding, architecture.scales)
    if architecture.head == "scalar" and model.post_process:
        model.output_layer = ScalarHead(config, groups.tp)
    return model


def _layer_specs(
    architecture: Architecture,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    implementation: Implementation,
    virtual_stage: int | None,
) -> TransformerBlockSubmodules:
    """Return Megatron's specs of the decoder layers of one chunk, by the kind of each."""
    family, rank = FAMILIES[architecture.family], groups.pp.rank()
    device = "cpu" if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
    rotary = Rotary(rotary_tables(architecture, device))
    first = get_transformer_layer_offset(config, virtual_stage, rank)
    kinds = architecture.layer_kinds[first : first + get_num_layers_to_build(config, virtual_stage, rank)]
    spec_of = {kind: family.layer_spec(architecture, kind, implementation, rotary) for kind in set(kinds)}
    # Transformer Engine's LayerNorm has a bias.
    norm: Any = WrappedTorchNorm if config.normalization == "LayerNorm" else LayerNormImpl
    return TransformerBlockSubmodules(layer_specs=[spec_of[kind] for kind in kinds], layer_norm=norm)
