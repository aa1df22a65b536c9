"""Megatron's gradient buffers and optimizer around the parameters that learn: a model's, or its adapters'."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhf_megatron.compat.torch import as_world
from rlhf_megatron.models.gradient_sums import sum_gradients_in_products
from rlhf_megatron.monitor.stopwatch import Stopwatch
from rlhf_megatron.recipe import OptimizerSection

BUCKET_ELEMENTS: int | None = None  # gathered or summed at a time; None: as many as Megatron takes


def make_optimizer(
    section: OptimizerSection,
    config: TransformerConfig,
    chunks: Sequence[torch.nn.Module],
    groups: Any,
    dtype: str,
    gradient_sync: Stopwatch,
    adapters: bool,
) -> tuple[list[Any], Any]:
    """Return (DistributedDataParallel around each of ``chunks``, the optimizer of their parameters), over ``groups``.

    ``config`` is the model's, whose schedule then sums gradients and times that by ``gradient_sync``. ``dtype`` is the
    chunks' own. ``adapters``: they are not the model, but what hangs on its layers.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=section.distributed,
        check_for_nan_in_grad=False,
        overlap_grad_reduce=section.overlap_grad_reduce,
        overlap_param_gather=section.overlap_param_gather,
        bucket_size=BUCKET_ELEMENTS,
    )
    wrapped: list[Any] = [DistributedDataParallel(config, ddp_config, chunk, pg_collection=groups) for chunk in chunks]
    sums: Callable[..., None] = functools.partial(_sum_gradients_of_adapters, wrapped)
    if not adapters:
        sums = finalize_model_grads
        for chunk in wrapped:
            sum_gradients_in_products(chunk)
    settings = _settings(section, dtype)
    with as_world(groups.intra_dist_opt):
        optimizer = get_megatron_optimizer(
            settings,
            wrapped,
            config_overrides=get_standard_config_overrides(settings),  # no weight decay on norms and biases
            use_gloo_process_groups=False,
            pg_collection=groups,
        )
    if section.overlap_grad_reduce:  # in the last micro-batch alone
        config.no_sync_func = wrapped[0].no_sync if len(wrapped) == 1 else [chunk.no_sync for chunk in wrapped]
    config.finalize_model_grads_func = functools.partial(_sum_gradients, gradient_sync, sums)
    return wrapped, optimizer


def _settings(section: OptimizerSection, dtype: str) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=section.learning_rate,
        min_lr=section.min_learning_rate,
        weight_decay=section.weight_decay,
        adam_beta1=section.beta1,
        adam_beta2=section.beta2,
        adam_eps=section.epsilon,
        clip_grad=section.clip_grad,
        params_dtype=getattr(torch, dtype),
        bf16=dtype == "bfloat16",
        fp16=dtype == "float16",
        # The role's own scale is gone when the optimizer gets the gradients; with None it would have another.
        loss_scale=1.0 if dtype == "float16" else None,
        use_distributed_optimizer=section.distributed,
    )


def _sum_gradients(
    stopwatch: Stopwatch, sums: Callable[..., None], chunks: list[Any], _tokens: Tensor | None, **settings: Any
) -> None:
    """Sum over ranks. Losses carry their global weights already, so no token count is divided by."""
    with stopwatch.running():
        sums(chunks, None, **settings)


def _sum_gradients_of_adapters(adapters: Sequence[Any], *_: Any, **__: Any) -> None:
    """Sum over a pipeline stage, each rank of which has a part of the gradient of each A and B; nothing is tied."""
    for chunk in adapters:
        chunk.finish_grad_sync()
