"""Measurement by a rank of the test of activations: the bytes that a pass keeps for its backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.compat import megatron

megatron.install()

from rlhf_megatron.data.rollout_batch import batch_from_rows  # noqa: E402
from rlhf_megatron.loops.sft import negative_log_likelihood  # noqa: E402
from rlhf_megatron.models.architecture import read_architecture  # noqa: E402
from rlhf_megatron.models.hf_files import CheckpointFiles  # noqa: E402
from rlhf_megatron.recipe import ActorSection, OptimizerSection  # noqa: E402
from rlhf_megatron.roles.role import Role  # noqa: E402
from rlhf_megatron.topology.layout import Layout  # noqa: E402


def kept_bytes(
    models: dict[str, str], tokens: int, modules: dict[str, list[str]] | None = None, context: int = 1
) -> dict[str, int]:
    """Return the bytes that this rank's decoder of each model keeps of one row of ``tokens``, parameters not among
    them, where it recomputes its ``modules`` and ``context`` ranks share the row."""
    found = {}
    for name, model in models.items():
        selected = (modules or {}).get(name)
        recompute = {"granularity": "selective", "modules": selected} if selected else {}
        architecture, learning = read_architecture(model).for_rows(tokens), OptimizerSection(learning_rate=1e-3)
        role = Role(
            "actor",
            architecture,
            Layout(context=context),
            range(context),
            ActorSection(tokens_per_gpu=tokens, optimizer=learning, recompute=recompute),
            dtype="float32",
            seed=1,
            optimizer=learning,
        )
        with CheckpointFiles(model, architecture) as files:
            role.load(files)
        kept: dict[int, Tensor] = {}
        [chunk] = role.shard.chunks
        parameters = {parameter.untyped_storage().data_ptr() for parameter in role.shard.module.parameters()}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        chunk.decoder.register_forward_pre_hook(lambda *_, hooks=hooks: hooks.__enter__())

        def measure(*_: Any, hooks: Any = hooks, name: str = name, kept: Any = kept, own: Any = parameters) -> None:
            hooks.__exit__()
            sizes = {pointer: tensor.untyped_storage().nbytes() for pointer, tensor in kept.items()}
            found[name] = sum(size for pointer, size in sizes.items() if pointer not in own)

        chunk.decoder.register_forward_hook(measure)
        row = torch.randint(1, architecture.vocabulary, (tokens,)).tolist()
        batch = batch_from_rows([row[:1]], [row[1:]])
        weights = torch.full(batch.tokens.shape, 1.0 / tokens)
        role.update(batch, {"weights": weights}, negative_log_likelihood)
    return found
