"""Models of vLLM's that draft for another one: what they have of their own."""

from __future__ import annotations

from rlhf_megatron.compat.patches import NONE_FOUND, patch
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
