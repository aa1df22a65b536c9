"""Models of vLLM's that draft for another one: what they have of their own, and when they are asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.compat.patches import NONE_FOUND, patch, replacement
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES


@patch(
    *PACKAGES,
    **KNOWN,
    why="vLLM learns from a checkpoint's names whether a head has an output layer of its own; with dummy weights it "
    "takes none to be there, and has the head draft by the policy's",
    upstream=NONE_FOUND,
)
def heads_have_output_layers() -> None:
    """Have EAGLE-3's heads keep their output layer, and take the policy's embeddings, where no file says which."""
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    Eagle3LlamaForCausalLM.has_own_lm_head = True
    Eagle3LlamaForCausalLM.has_own_embed_tokens = False


class KeptBuffers:
    """Buffers of a model that drafts beside its weights, such as tables of angles, while vLLM sleeps.

    Where weights are dropped, vLLM before 0.32 keeps those of the policy alone.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        """Copy those of ``model`` to the host; without one there are none."""
        self._model = model
        self._buffers = {} if model is None else {name: each.cpu().clone() for name, each in model.named_buffers()}

    def restore(self) -> None:
        """Write them to the model again."""
        for name, buffer in self._model.named_buffers() if self._model is not None else ():
            buffer.copy_(self._buffers[name])


@replacement(
    *PACKAGES,
    **KNOWN,
    why="vLLM drafts for any number of sequences, or by a schedule that its newer runner does not follow",
    upstream="https://github.com/vllm-project/vllm/pull/32374",
)
def draft_while_few_run(runner: Any, max_running: int) -> None:
    """Have the model that drafts for vLLM's older ``runner`` draft while at most ``max_running`` sequences run.

    While more do, it computes its cache alone, without which later drafts would be bad ones.
    """
    drafter = runner.drafter
    drafter.propose = ProposalsWhileFewRun(drafter.propose, max_running)
    # vLLM would leave out all drafts where one sequence is near its end; the drafter itself stays in its cache.
    runner.effective_drafter_max_model_len = drafter.max_model_len + drafter.num_speculative_tokens


class ProposalsWhileFewRun:
    """Function that stands in for ``propose`` of a drafter of vLLM's older runner."""

    def __init__(self, propose: Callable[..., Tensor], max_running: int) -> None:
        """Ask ``propose`` for drafts of at most ``max_running`` sequences, of more for none."""
        self._propose, self.max_running = propose, max_running

    def __call__(self, *, num_speculative_tokens: int, next_token_ids: Tensor, **named: Any) -> Tensor:
        """Return drafts [sequences, tokens of each]."""
        count = num_speculative_tokens if len(next_token_ids) <= self.max_running else 0
        return self._propose(num_speculative_tokens=count, next_token_ids=next_token_ids, **named)
