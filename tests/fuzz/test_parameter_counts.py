"""Planning counts one layer of each kind; the numbers are those of all blocks of the fullest rank, in any layout."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.models.architecture import Architecture, parse_architecture
from rlhf_megatron.models.weight_map import Block, megatron_blocks, rollout_blocks
from rlhf_megatron.planning.parameters import rank_parameters
from rlhf_megatron.planning.rollout_parameters import replica_of, rollout_parameters, shareable_parameters
from rlhf_megatron.regather.shard_specs import parameter_shapes
from rlhf_megatron.topology.layout import Layout


@st.composite
def architectures(draw: st.DrawFn, layers: int = 3) -> Architecture:
    heads = draw(st.sampled_from([4, 8]))
    config = {
        "model_type": draw(st.sampled_from(["llama", "mixtral", "qwen2", "qwen3", "qwen3_moe"])),
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([2, heads])),
        "head_dim": 16,
        "intermediate_size": 48,
        "vocab_size": draw(st.sampled_from([64, 256])),  # a multiple of what pads it, which no block shows
        "tie_word_embeddings": draw(st.booleans()),
    }
    if config["model_type"] == "qwen3_moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if config["model_type"] == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    return parse_architecture(config, "here").with_head(draw(st.sampled_from(["language", "scalar"])))


@st.composite
def cut_models(draw: st.DrawFn) -> tuple[Architecture, Layout]:
    """Return a model and a layout that it can be cut into."""
    tensor, pipeline, chunks = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    first, between, last = (chunks * draw(st.integers(1, 2)) for _ in range(3))
    edges = {"first_stage_layers": first, "last_stage_layers": last} if pipeline > 1 and draw(st.booleans()) else {}
    layers = first + last + (pipeline - 2) * between if edges else pipeline * between
    architecture = draw(architectures(layers))
    experts: dict[str, int | None] = {}
    if architecture.experts:
        experts = {"expert": draw(st.sampled_from([1, 2, 4])), "expert_tensor": draw(st.sampled_from([None, 1, 2]))}
    return architecture, Layout(tensor, pipeline, 8, virtual_pipeline=chunks, **edges, **experts)


def held(blocks: Iterable[Block]) -> int:
    """Return elements of the parameters that ``blocks`` fill."""
    return sum(map(math.prod, parameter_shapes(list(blocks)).values()))


@given(cut_models())
def test_a_rank_holds_what_its_blocks_say(cut: tuple[Architecture, Layout]) -> None:
    architecture, layout = cut
    architecture.check_layout(layout)
    per_stage = layout.size // layout.pipeline
    for stage in range(layout.pipeline):
        positions = range(stage * per_stage, (stage + 1) * per_stage)
        fullest = max(held(megatron_blocks(architecture, layout, position, "local")) for position in positions)
        counted = rank_parameters(architecture, layout, stage)
        assert counted.total == fullest
        if architecture.head == "language":  # as vLLM's is in any case
            replica = replica_of(architecture, layout.tensor)
            shareable = shareable_parameters(architecture, layout, stage, replica, in_buckets=False)
            assert counted.embeddings <= shareable <= counted.total


@given(architectures(), st.sampled_from([1, 2, 4]), st.booleans())
def test_a_rank_of_a_replica_holds_what_its_blocks_say(architecture: Architecture, tensor: int, whole: bool) -> None:
    language = architecture.with_head("language")
    fullest = max(held(rollout_blocks(language, tensor, rank, whole)) for rank in range(tensor))
    assert rollout_parameters(language, tensor, whole, replica_of(language, tensor, whole)).total == fullest


@given(st.integers(1, 12), st.integers(1, 6), *[st.none() | st.integers(1, 6)] * 2, st.integers(1, 3))
def test_no_stage_is_empty_and_none_is_lost(
    layers: int, pipeline: int, first: int | None, last: int | None, chunks: int
) -> None:
    layout = Layout(pipeline=pipeline, virtual_pipeline=chunks, first_stage_layers=first, last_stage_layers=last)
    try:
        counts = layout.stage_layers(layers)
    except RecipeError as error:
        with pytest.raises(RecipeError) as refused:
            layout.stage_chunks(layers)
        assert str(refused.value) == str(error) and str(error).startswith("layout.")
    else:
        stages = layout.stage_chunks(layers)
        assert min(counts) > 0 and [sum(map(len, stage)) for stage in stages] == counts
        assert sorted(layer for stage in stages for chunk in stage for layer in chunk) == list(range(layers))
