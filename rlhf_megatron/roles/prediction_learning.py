"""Learning of a layer for multi-token prediction from the actor's update: of the same rows, in the same passes.

In each micro-batch the layer takes what the actor's decoder gives, and the embedding of the token behind, and predicts
the sampled token after that, by the actor's output layer. Its loss is the mean negative logprob of these tokens, at the
rollout's temperature: what a draft is accepted by. Embeddings, output layer and decoder are not changed by it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.algorithms.totals import total
from rlhf_megatron.data.packing import MicroBatch
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.roles.outputs import joined
from rlhf_megatron.roles.role import Role
from rlhf_megatron.roles.token_embeddings import TokenEmbeddings


class PredictionLearning:
    """Learner beside the actor (see ``Beside``), on the ranks of its last pipeline stage; ``draft`` is None on others.

    Every rank of the actor makes it.
    """

    def __init__(self, actor: Role, draft: Role | None, embeddings: TokenEmbeddings | None = None) -> None:
        """Set up; ``draft``: the layer, on the same ranks as the actor's last stage, cut as a stage is."""
        self._draft, self._embeddings = draft, embeddings or TokenEmbeddings(actor)
        self._weight, self._rate = 0.0, 0.0
        self._sums = torch.zeros(2, dtype=torch.float64)

    def begin(self, batch: RolloutBatch) -> None:
        """See Beside."""
        self._embeddings.begin()
        if self._draft is None:
            return
        # The second token of a row has none before it whose output could predict it.
        begins, is_counted = batch.cu_seqlens[:-1], self._counted(batch)
        second = begins[batch.lengths > 1] + 1
        counted = is_counted.sum() - is_counted[second].sum()
        first = is_counted[begins[batch.lengths > 0]].sum()  # a row without a prompt; nothing predicts it
        tokens = float(total((counted - first).double()[None], self._draft.totals))
        self._weight = 1.0 / max(tokens, 1.0)
        self._rate = self._draft.begin_step()

    def clear(self) -> None:
        """See Beside."""
        self._sums = torch.zeros_like(self._sums)
        if self._draft is not None:
            assert self._draft.trainer is not None
            self._draft.trainer.zero_gradients()

    def learn(self, hidden: Tensor, columns: Tensor, micro: MicroBatch, packed: Any) -> None:
        """See Beside."""
        draft = self._role
        assert draft.trainer is not None
        chunk = draft.trainer.chunks[0]

        def read(*, hidden_states: Tensor, output_layer: Any, **_: Any) -> Tensor:
            logprobs, is_counted = self._logprobs(hidden_states, output_layer, columns, micro)
            return torch.stack([logprobs, is_counted.to(logprobs.dtype)])

        parts = chunk(
            micro.tokens[None],
            micro.positions[None],
            None,
            decoder_input=self._input(chunk.module, hidden, micro),
            packed_seq_params=packed,
            output_processor=read,
        )
        logprobs, counted = joined(parts.unbind(), micro, draft.groups.cp)
        (-self._weight * logprobs.sum()).backward()
        self._sums = self._sums.to(logprobs.device)
        self._sums += torch.stack([-logprobs.detach().double().sum(), counted.double().sum()])

    @property
    def _role(self) -> Role:
        assert self._draft is not None
        return self._draft

    def _counted(self, batch: RolloutBatch) -> Tensor:
        """Return [T] bool: the tokens that are to be predicted, wherever in their row they are."""
        return batch.response_mask

    def _input(self, module: Any, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """Return what the draft's decoder reads, given what the actor's gives."""
        given: Tensor = module.embedding(self._embeddings.of(micro), hidden)
        return given

    def _logprobs(self, hidden: Tensor, output_layer: Any, columns: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return (logprobs [m] of sampled tokens, whether each counts), given what the draft's decoder gives."""
        logprobs = self._role.output(hidden, self._embeddings, columns, micro)[0]
        return logprobs, torch.ones_like(logprobs)

    def take_step(self) -> dict[str, Tensor]:
        """See Beside: the loss, the norm of its gradient, the learning rate, and whether the step was skipped."""
        draft = self._draft
        self._embeddings.end()
        if draft is None:
            return {}
        norm, is_taken = draft.end_step()
        ones = {"grad_norm": norm, "learning_rate": self._rate, "skipped": float(not is_taken)}
        each = {name: torch.tensor([value, 1.0], dtype=torch.float64) for name, value in ones.items()}
        return {f"draft_{name}": value for name, value in ({"loss": self._sums} | each).items()}
