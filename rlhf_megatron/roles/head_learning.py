"""Learning of a head in EAGLE-3's form from the actor's update: of the same rows, in the same passes.

In each micro-batch the head reads hidden states of the actor, before some of its layers, and the embedding of the token
behind, and predicts the sampled token after that. Its loss is the mean negative logprob of these tokens among those
that it drafts, at the rollout's temperature; sampled tokens that it cannot draft do not count. It learns the first of a
draft's tokens. Those behind it, which vLLM drafts by the head's own output in place of hidden states, are not trained
for, as EAGLE-3's training-time test does. The actor's embeddings and decoder are not changed by it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from rlhf_megatron.data.packing import MicroBatch
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.models.draft_heads import check_target_layout
from rlhf_megatron.models.draft_vocabulary import DraftVocabulary
from rlhf_megatron.roles.prediction_learning import PredictionLearning
from rlhf_megatron.roles.role import Role
from rlhf_megatron.roles.token_embeddings import TokenEmbeddings


class HeadLearning(PredictionLearning):
    """Learner beside the actor (see ``Beside``), on all of its ranks; the actor has one pipeline stage."""

    def __init__(self, actor: Role, draft: Role, vocabulary: DraftVocabulary) -> None:
        """Set up; ``draft``: the head, on the actor's ranks, with its degrees of tensor and context parallelism.

        Their sections agree in ``sequence_parallel``. Raises RecipeError where the actor has several stages.
        """
        check_target_layout(actor.layout)
        cuts = actor.shard.config.sequence_parallel
        assert draft.shard.config.sequence_parallel == cuts, "actor and head differ in sequence_parallel"
        super().__init__(actor, draft, TokenEmbeddings(actor, plain=True))
        self._draft_ids = vocabulary.draft_ids
        self._states = AuxiliaryStates(unwrap_model(actor.shard.chunks[0]).decoder, draft.architecture.auxiliary_layers)

    def begin(self, batch: RolloutBatch) -> None:
        """See Beside."""
        super().begin(batch)
        self._draft_ids = self._draft_ids.to(self._role.device)
        self._states.begin()

    def take_step(self) -> dict[str, Tensor]:
        """See Beside."""
        self._states.end()
        return super().take_step()

    def _counted(self, batch: RolloutBatch) -> Tensor:
        return batch.response_mask & (self._draft_ids.to(batch.tokens.device)[batch.tokens] >= 0)

    def _input(self, module: Any, hidden: Tensor, micro: MicroBatch) -> Tensor:
        features = module.embedding(self._states.take())
        return torch.cat([self._embeddings.of(micro), features], dim=-1)

    def _logprobs(self, hidden: Tensor, output_layer: Any, columns: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        targets = self._draft_ids[micro.targets]
        is_drafted, drafted = targets >= 0, dataclasses.replace(micro, targets=targets.clamp(min=0))
        logprobs, _ = self._role.output(hidden, output_layer, None, drafted)
        return logprobs.where(is_drafted, 0), is_drafted


class AuxiliaryStates:
    """Hidden states of a model in its forward pass: the residual stream before some layers, as vLLM numbers them.

    They are kept from a forward pass until they are taken, and not where it is made again for the backward pass.
    """

    def __init__(self, decoder: Any, layers: tuple[int, ...]) -> None:
        """Set up for ``layers`` of Megatron's TransformerBlock; their number stands for what the last one gives."""
        self._count, self._is_asked, self._is_passing = len(layers), False, False
        self._kept: dict[int, Tensor] = {}
        decoder.register_forward_pre_hook(self._pass)
        places = [*decoder.layers, decoder.final_layernorm]
        for layer in layers:
            places[layer].register_forward_pre_hook(self._keeper(layer), with_kwargs=True)

    def begin(self) -> None:
        """Keep those of the forward passes from now on."""
        self._is_asked = True

    def end(self) -> None:
        """Keep no more."""
        self._is_asked = self._is_passing = False
        self._kept.clear()

    def take(self) -> Tensor:
        """Return those of the last forward pass, [t, 1, states * hidden] of this rank's tokens."""
        assert len(self._kept) == self._count, "the model has made no forward pass"
        states = torch.cat([self._kept[layer] for layer in sorted(self._kept)], dim=-1)
        self._kept.clear()
        self._is_passing = False
        return states

    def _pass(self, *_: Any) -> None:
        self._is_passing = self._is_asked

    def _keeper(self, layer: int) -> Any:
        def keep(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if self._is_passing:
                hidden = arguments[0] if arguments else named["hidden_states"]
                self._kept[layer] = hidden.detach()

        return keep
