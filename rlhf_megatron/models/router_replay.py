"""Router replay: routers of a Megatron model take the experts that they are told, with weights of their own (R3, arXiv
2510.11370).

The choices travel with the boundaries of the packed rows, which every layer gets, also where its activations are
recomputed in the backward pass: so each router replays its own micro-batch's, whatever ran meanwhile. Megatron's
``RouterReplay`` keeps one list of routers for the whole process, and replays in the order of its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.data.expert_choices import is_known
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.choice_shape import layers_with_experts


class ReplayedRouter:
    """Stand-in for Megatron's RouterReplay in one router; without ``choices`` the router's own are taken."""

    choices: Tensor | None = None  # [t, chosen]

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (scores, experts) of those to take for each token: its own where nothing is known, such as of
        padding."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.choices is None:
            return values, own
        taken = self.taken(own)
        return scores.gather(1, taken), taken

    def taken(self, own: Tensor) -> Tensor:
        """Return [t, chosen]: the experts to take where a router would choose its ``own``."""
        if self.choices is None:
            return own
        return torch.where(is_known(self.choices[:, None])[:, None], self.choices.long(), own)


def install_replay(architecture: Architecture, chunks: Sequence[torch.nn.Module]) -> list[int]:
    """Have the routers of this rank's ``chunks`` replay what comes with ``PackedSequences``.

    Returns which of the model's layers with experts, counted among these, are here.
    """
    numbers = {layer: number for number, layer in enumerate(layers_with_experts(architecture))}
    layers: list[Any] = [layer for chunk in chunks for layer in _of_chunk(chunk)]
    routed = [layer for layer in layers if layer.layer_number - 1 in numbers]
    for index, layer in enumerate(routed):
        layer.mlp.router.router_replay = ReplayedRouter()
        layer.register_forward_pre_hook(_tell_router(layer.mlp.router.router_replay, index), with_kwargs=True)
    return [numbers[layer.layer_number - 1] for layer in routed]


def _of_chunk(chunk: Any) -> Sequence[Any]:
    layers: Sequence[Any] = chunk.decoder.layers
    return layers


def _tell_router(router: ReplayedRouter, index: int) -> Callable[..., None]:
    """Return a hook that runs before a layer and gives its router the choices of the layer's tokens."""

    def tell(_: Any, __: Any, named: dict[str, Any]) -> None:
        choices = getattr(named.get("packed_seq_params"), "expert_choices", None)
        router.choices = None if choices is None else choices[:, index]

    return tell
