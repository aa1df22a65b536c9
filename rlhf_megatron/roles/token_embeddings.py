"""The actor's token embeddings on the ranks of its last pipeline stage, for what drafts there."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.utils import unwrap_model
from torch import Tensor

from rlhf_megatron.data.packing import MicroBatch
from rlhf_megatron.models.sublayers import scale_embeddings
from rlhf_megatron.roles.role import Role


class TokenEmbeddings:
    """Embeddings by the weights that the actor has when a step begins.

    Of several pipeline stages the last one gets a copy of them from the first, for the time of a step.

    Attributes:
        sequence_parallel: whether each tensor-parallel rank has those of its own tokens.
    """

    def __init__(self, actor: Role, plain: bool = False) -> None:
        """Set up, on every rank of the actor; ``plain``: as in the table, without factors, and of first tokens too."""
        shard, self._plain = actor.shard, plain
        self.sequence_parallel = shard.config.sequence_parallel
        self._tensor_group, self._stages = shard.groups.tp, shard.groups.pp
        self._embedding: Any = None
        stage, last = self._stages.rank(), self._stages.size() - 1
        if stage == 0:
            self._embedding = unwrap_model(shard.chunks[0]).embedding
        elif stage == last:
            self._embedding = LanguageModelEmbedding(
                shard.config,
                shard.architecture.padded_vocabulary(shard.layout.tensor),
                shard.architecture.max_positions,
                position_embedding_type="none",
                tp_group=shard.groups.tp,
            ).requires_grad_(False)
            scale_embeddings(self._embedding, shard.architecture.scales)
            self._embedding.to(actor.device, shard.config.params_dtype)
            self._give_back()

    def begin(self) -> None:
        """Have the weights of now; collective over the ranks of the actor's model."""
        last = self._stages.size() - 1
        if not last or self._embedding is None:
            return
        weight = self._embedding.word_embeddings.weight.data
        if self._stages.rank():
            weight.untyped_storage().resize_(weight.nbytes)
            dist.recv(weight, dist.get_global_rank(self._stages, 0), group=self._stages)
        else:
            dist.send(weight, dist.get_global_rank(self._stages, last), group=self._stages)

    def end(self) -> None:
        """Give the memory of a copy back."""
        if self._stages.rank() and self._embedding is not None:
            self._give_back()

    def _give_back(self) -> None:
        self._embedding.word_embeddings.weight.data.untyped_storage().resize_(0)

    @torch.no_grad()
    def of(self, micro: MicroBatch) -> Tensor:
        """Return [t, 1, hidden]: of this rank's tokens; of each row's first 0, as in vLLM, or ``plain``."""
        if self._plain:
            # Not by a call of the module, whose hook multiplies with the model's factor.
            plain: Tensor = self._embedding.forward(micro.tokens[None], micro.positions[None])
            return plain
        embeddings: Tensor = self._embedding(micro.tokens[None], micro.positions[None])
        positions = micro.positions
        if self.sequence_parallel:
            positions = positions.chunk(self._tensor_group.size())[self._tensor_group.rank()]
        return embeddings.masked_fill((positions == 0)[:, None, None], 0)
