"""The logprob of one token of each row of logits that are there anyway, as in a sampler; without gradients.

Torch's own log_softmax is the reference, and what CPUs use. On a GPU one Triton kernel (``triton_token_logprob``) reads
each row once and writes nothing but the results.
"""

from __future__ import annotations

from torch import Tensor


def token_logprobs_reference(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return [n] float32, of ``tokens`` [n] int64 by ``logits`` [n, vocabulary], which may be -inf but not all of a
    row."""
    return logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Do as the reference does; a GPU's rows must be contiguous."""
    if not logits.is_cuda:
        return token_logprobs_reference(logits, tokens)
    from rlhf_megatron.kernels.triton_token_logprob import launch

    return launch(logits, tokens)
