"""The part of a cache that the host has while the GPU is the trainer's, by its memory and by vLLM's pool of blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhf_megatron.compat.vllm import paused_cache
from rlhf_megatron.compat.vllm.paused_cache import HostCopy, Rows, cache_rows, tensors_of, used_blocks
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

BLOCKS, USED = 6, [0, 2, 5]
SIZE = 16  # tokens of a block
CPU = torch.device("cpu")


@pytest.mark.parametrize("chunk", [1, 100, 1 << 28])
def test_what_was_kept_comes_back_and_nothing_else(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paused_cache, "_CHUNK", chunk)
    host = HostCopy()
    for width in (40, 8):  # with more memory on the host than the second needs
        pages, tables = (torch.randint(256, (count, width), dtype=torch.uint8) for count in (BLOCKS, 1))
        before = pages.clone(), tables.clone()
        host.save([Rows(pages, torch.tensor(USED)), Rows(tables, None)])
        assert host.size == (len(USED) + 1) * width
        pages.zero_()
        tables.zero_()
        host.restore()
        expected = torch.zeros_like(pages)
        expected[USED] = before[0][USED]
        assert torch.equal(pages, expected) and torch.equal(tables, before[1])
        pages.zero_()
        host.restore()
        assert not pages.any(), "it is restored once"


def test_caches_are_kept_by_block_and_all_beside_them_whole() -> None:
    whole = np.zeros(4096, dtype=np.uint8)
    at = whole.ctypes.data

    def cache(begin: int, *shape: int) -> torch.Tensor:
        """Return a part of ``whole`` as a tensor with a storage of its own, in bfloat16."""
        size = 2 * torch.Size(shape).numel()
        return torch.frombuffer(whole.data[begin : begin + size], dtype=torch.bfloat16).view(shape)

    by_block, of_small_blocks = cache(256, BLOCKS, 2, 4), cache(512, 2 * BLOCKS, 4)
    keys_then_values, of_others = cache(1024, 2, BLOCKS, 4), cache(2048, BLOCKS, 4)
    caches = tensors_of([by_block, [of_small_blocks], keys_then_values, of_others])
    rows = cache_rows([(at, 512), (at + 512, 1024)], caches, BLOCKS, USED, CPU)
    found = [(each.memory.data_ptr() - at, tuple(each.memory.shape), each.kept is not None) for each in rows]
    assert found == [
        (0, (1, 256), False),
        (256, (BLOCKS, 16), True),
        (352, (1, 160), False),
        (512, (BLOCKS, 16), True),
        (608, (1, 928), False),  # where keys come first, blocks are not in one piece
    ]
    assert all(each.kept is None or each.kept.tolist() == USED for each in rows)


def test_blocks_of_requests_stay_and_prefixes_of_ended_ones_are_forgotten() -> None:
    prepare_environment()
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    pool = BlockPool(num_gpu_blocks=BLOCKS, enable_caching=True, hash_block_size=SIZE)
    held, hashes = [], []
    for name in range(2):
        prompt = [10 * name + token for token in range(2 * SIZE)]
        hasher = get_request_block_hasher(SIZE, sha256)
        request = Request(str(name), prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        held.append(pool.get_new_blocks(2))
        pool.cache_full_blocks(request, held[-1], 0, 2, SIZE, 0)
        hashes += request.block_hashes
    running, ended = held
    pool.free_blocks(ended)
    assert all(pool.get_cached_block(of_block, [0]) for of_block in hashes)
    used = set(used_blocks(pool))
    assert {block.block_id for block in running} <= used
    assert not {block.block_id for block in ended} & used
    assert [pool.get_cached_block(of_block, [0]) is not None for of_block in hashes] == [True, True, False, False]
