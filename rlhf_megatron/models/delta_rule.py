"""The gated delta rule over packed rows in plain torch, chunk by chunk (arXiv 2412.06464, section 3.3).

A state S [d, e] of each head forgets and is corrected by each token: S <- a S + b k (v - a S^T k)^T, and the token's
output is S^T q / sqrt(d). Within a chunk of tokens the corrections are the solution of one triangular system, so that
only states are computed one after the other; rows take their next chunk at the same time, those that have one.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhf_megatron.kernels.rotary import positions

CHUNK = 64  # tokens: as many as Megatron and flash-linear-attention take together


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """Map [t, heads, d] of queries and keys, [t, heads, e] of values, [t, heads] of log a and b -> [t, heads, e].

    Each row begins with a state of 0; ``chunks`` are those of the rows. Computed in float32, or in float64 where
    queries are; for a backward pass only the arguments are kept, and the rest is computed again.
    """
    if not len(query):
        return torch.zeros_like(value)
    out: Tensor = checkpoint(
        _by_chunks, query, key, value, decay, beta, chunks, use_reentrant=False, preserve_rng_state=False
    )
    return out


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of packed rows: the first ones of all rows, longest row first, then the second ones, and so on.

    Attributes:
        running: how many rows have a first chunk, a second one, ...; falling.
        chunk: [t], of each token.
        position: [t], of each token in its chunk.
    """

    running: list[int]
    chunk: Tensor
    position: Tensor


def chunks_of(boundaries: Tensor, tokens: int) -> Chunks:
    """Return the chunks of rows of ``tokens`` in all, between ``boundaries`` [rows + 1] int64. Waits for a GPU."""
    counts = -(-boundaries.diff() // CHUNK)
    by_length = counts.argsort(descending=True, stable=True)
    running = len(counts) - counts.bincount().cumsum(0)[:-1]
    first = running.cumsum(0) - running
    position = positions(boundaries, tokens)
    row = torch.bucketize(torch.arange(tokens, device=boundaries.device), boundaries[1:], right=True)
    return Chunks(running.tolist(), first[position // CHUNK] + by_length.argsort()[row], position % CHUNK)


def _by_chunks(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """Return the rule; [chunks, heads, CHUNK, ...] inside, where places behind the end of a row are 0 and change
    nothing."""
    wide = torch.promote_types(query.dtype, torch.float32)
    count = sum(chunks.running)

    def chunked(packed: Tensor) -> Tensor:
        out = packed.new_zeros(count, packed.size(1), CHUNK, *packed.shape[2:], dtype=wide)
        out[chunks.chunk, :, chunks.position] = packed.to(wide)
        return out

    q, k, v = chunked(query) * query.size(-1) ** -0.5, chunked(key), chunked(value)
    strength, forgotten = chunked(beta)[..., None], chunked(decay).cumsum(-1)
    # How much is left, of what one token of a chunk has added, when a later one comes; 0 for earlier ones.
    left = (forgotten[..., :, None] - forgotten[..., None, :]).tril().exp().tril()
    since_start, until_end = forgotten.exp()[..., None], (forgotten[..., -1:] - forgotten).exp()[..., None]
    corrections = torch.linalg.solve_triangular(
        (strength * k @ k.mT * left).tril(-1),
        strength * torch.cat([v, k * since_start], dim=-1),
        upper=False,
        unitriangular=True,
    )
    own, of_state = corrections.split([v.size(-1), k.size(-1)], dim=-1)
    within = q @ k.mT * left
    added = k * until_end
    parts = (torch.cat([of_state, q * since_start], dim=-2), own, within, added, since_start[..., -1:, :])
    state = q.new_zeros(chunks.running[0], q.size(1), q.size(-1), v.size(-1))
    outs = []
    for of_both, own_, within_, added_, remains in zip(*(part.split(chunks.running) for part in parts), strict=True):
        state = state[: len(own_)]
        read, seen = (of_both @ state).chunk(2, dim=-2)
        new = own_ - read
        outs.append(seen + within_ @ new)
        state = state * remains + added_.mT @ new
    return torch.cat(outs)[chunks.chunk, :, chunks.position].to(query.dtype)
