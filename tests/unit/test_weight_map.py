"""The weight map and the regather plan, against tensors cut by hand and against brute force; no process group."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rlhf_megatron.models.architecture import Architecture, Head, ModelError
from rlhf_megatron.models.hf_files import window
from rlhf_megatron.models.weight_map import SCORE, Block, megatron_blocks, rollout_blocks, tensor_shapes, whole_blocks
from rlhf_megatron.regather.plan import PlanError, bytes_received, elements, plan_regather, rounds, split_copy
from rlhf_megatron.topology.layout import Layout


def architecture(tied: bool = True, key_value_heads: int = 4, layers: int = 4, vocabulary: int = 200) -> Architecture:
    return Architecture(
        family="qwen3",
        layers=layers,
        hidden=16,
        feed_forward=24,
        heads=8,
        key_value_heads=key_value_heads,
        head_dim=4,
        vocabulary=vocabulary,
        max_positions=64,
        norm_epsilon=1e-6,
        rope_theta=1e4,
        rope_scaling_factor=None,
        tied_embeddings=tied,
        query_key_norm=True,
        qkv_bias=True,
    )


def checkpoint(a: Architecture) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(a).items()}


def filled(blocks: list[Block], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters as large as the blocks say, NaN where no block reaches."""
    sizes: dict[str, list[int]] = {}
    for block in blocks:
        ends = [begin + stop - start for begin, (start, stop) in zip(block.offset, block.region, strict=True)]
        known = sizes.setdefault(block.parameter, ends)
        sizes[block.parameter] = [max(pair) for pair in zip(known, ends, strict=True)]
    parameters = {name: torch.full(size, torch.nan) for name, size in sizes.items()}
    for block in blocks:
        target = window(parameters[block.parameter], block.offset, block.region)
        assert target.isnan().all(), f"{block} overlaps another block"
        target.copy_(tensors[block.tensor][tuple(slice(*span) for span in block.region)])
    return parameters


LAYOUTS = [Layout(1, 1, 1), Layout(2, 1, 1), Layout(1, 2, 1), Layout(2, 2, 2), Layout(4, 1, 2), Layout(1, 4, 1)]


@pytest.mark.parametrize("head", ["language", "scalar"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_megatron_shards_hold_every_element_and_leave_no_hole(layout: Layout, tied: bool, head: Head) -> None:
    a = architecture(tied).with_head(head)
    seen = {name: torch.zeros(shape) for name, shape in tensor_shapes(a).items()}
    for position in range(layout.size):
        if layout.coordinates(position).data:
            continue
        blocks = megatron_blocks(a, layout, position, "local")
        for parameter in filled(blocks, checkpoint(a)).values():
            assert not parameter.isnan().any()
        for block in blocks:
            seen[block.tensor][tuple(slice(*span) for span in block.region)] += 1
    for name, count in seen.items():
        # Whole tensors are on each tensor rank, tied embeddings on the first and last stage, the rest exactly once.
        replicated = "norm" in name or name == SCORE
        copies = layout.tensor if replicated else 1
        twice = tied and head == "language" and name == "model.embed_tokens.weight" and layout.pipeline > 1
        copies *= 2 if twice else 1
        assert (count == copies).all(), name


def test_megatron_interleaves_queries_keys_and_values_by_group() -> None:
    a = architecture()
    tensors = checkpoint(a)
    parameters = filled(megatron_blocks(a, Layout(2), 1, "local"), tensors)
    q, k, v = (tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    groups = [torch.cat([q[g * 8 : g * 8 + 8], k[g * 4 : g * 4 + 4], v[g * 4 : g * 4 + 4]]) for g in (2, 3)]
    assert torch.equal(parameters["decoder.layers.0.self_attention.linear_qkv.weight"], torch.cat(groups))


def test_vllm_puts_queries_first_and_repeats_keys_where_there_are_more_ranks_than_heads() -> None:
    a = architecture(key_value_heads=2)
    tensors = checkpoint(a)
    parameters = filled(rollout_blocks(a, 4, 3), tensors)
    q, k, v = (tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    assert torch.equal(parameters["model.layers.0.self_attn.qkv_proj.weight"], torch.cat([q[24:], k[4:], v[4:]]))


@pytest.mark.parametrize("rollout_tensor", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_plan_fills_every_rollout_shard_exactly(layout: Layout, rollout_tensor: int) -> None:
    for tied, key_value_heads in itertools.product([True, False], [4, 8]):
        a = architecture(tied, key_value_heads)
        tensors = checkpoint(a)
        world = max(layout.size, rollout_tensor)
        sources = {rank: megatron_blocks(a, layout, rank, "transformer_engine") for rank in range(layout.size)}
        wanted = {rank: rollout_blocks(a, rollout_tensor, rank % rollout_tensor) for rank in range(world)}
        held = {rank: filled(blocks, tensors) for rank, blocks in sources.items()}
        targets = {
            rank: {name: torch.full_like(value, torch.nan) for name, value in filled(blocks, tensors).items()}
            for rank, blocks in wanted.items()
        }
        written = {
            rank: {name: torch.zeros_like(value) for name, value in parameters.items()}
            for rank, parameters in targets.items()
        }
        for copy in plan_regather(sources, wanted):
            for piece in split_copy(copy, 50):
                origin = window(held[piece.source][piece.source_parameter], piece.source_offset, piece.region)
                spot = (piece.destination_parameter, piece.destination_offset, piece.region)
                window(targets[piece.destination][spot[0]], spot[1], spot[2]).copy_(origin)
                window(written[piece.destination][spot[0]], spot[1], spot[2]).add_(1)
        for rank, blocks in wanted.items():
            for name, expected in filled(blocks, tensors).items():
                assert torch.equal(targets[rank][name], expected), (rank, name)
                assert (written[rank][name] == 1).all(), (rank, name)


def test_equal_layouts_move_nothing() -> None:
    a = architecture(tied=False)
    sources = {rank: megatron_blocks(a, Layout(2), rank, "local") for rank in range(2)}
    wanted = {rank: rollout_blocks(a, 2, rank) for rank in range(2)}
    assert sum(bytes_received(plan_regather(sources, wanted), 2).values()) == 0


def test_a_rank_receives_only_what_it_lacks() -> None:
    a = architecture(tied=False, vocabulary=192)
    sources = {rank: megatron_blocks(a, Layout(2), rank, "local") for rank in range(2)}
    wanted = {rank: rollout_blocks(a, 1, 0) for rank in range(2)}
    cut = sum(elements(((0, s[0]), *((0, n) for n in s[1:]))) for n, s in tensor_shapes(a).items() if "norm" not in n)
    assert bytes_received(plan_regather(sources, wanted), 4) == {0: cut // 2 * 4, 1: cut // 2 * 4}


def test_a_source_on_the_same_node_is_preferred() -> None:
    a = architecture()
    sources = {rank: megatron_blocks(a, Layout(1, 1, 4), rank, "local") for rank in (0, 1, 2, 3)}
    wanted = {rank: whole_blocks(a) for rank in (4, 5)}
    sources[6] = sources.pop(3)
    assert {copy.source for copy in plan_regather(sources, wanted, ranks_per_node=4)} == {6}


def test_a_missing_source_is_named() -> None:
    a = architecture()
    half = {0: megatron_blocks(a, Layout(2), 0, "local")}
    with pytest.raises(PlanError, match=r"model\.embed_tokens\.weight.*rank 0.*of 3200 elements"):
        plan_regather(half, {0: whole_blocks(a)})


def test_rounds_bound_what_a_pair_moves_at_once_and_lose_nothing() -> None:
    a = architecture(tied=False)
    sources = {rank: megatron_blocks(a, Layout(4), rank, "local") for rank in range(4)}
    copies = plan_regather(sources, {rank: rollout_blocks(a, 1, 0) for rank in range(4)})
    turns = rounds(copies, 100)
    for turn in turns:
        for pair in {(copy.source, copy.destination) for copy in turn}:
            moved = [copy.elements for copy in turn if (copy.source, copy.destination) == pair]
            assert sum(moved) <= 100 or len(moved) == 1
    remote = sum(copy.elements for copy in copies if copy.source != copy.destination)
    assert sum(copy.elements for turn in turns for copy in turn) == remote


def test_layouts_that_do_not_fit_are_refused_in_one_line() -> None:
    with pytest.raises(ModelError, match="layout.tensor=3 does not divide the model's 8 attention heads"):
        architecture().check_layout(Layout(3))
    with pytest.raises(ValueError, match="4 layers do not split over 3 pipeline stages"):
        architecture().check_layout(Layout(1, 3))
    assert [len(s) for s in Layout(1, 3, first_stage_layers=1, last_stage_layers=1).stage_layers(4)] == [1, 2, 1]


def test_coordinates_follow_megatrons_order() -> None:
    layout = Layout(tensor=2, pipeline=2, data=2)
    assert sorted(layout.groups_along("tensor")) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(layout.groups_along("data")) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sorted(layout.groups_along("pipeline")) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    for position in range(8):
        place = layout.coordinates(position)
        assert layout.position(place.tensor, place.data, place.pipeline) == position
