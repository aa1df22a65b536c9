"""The weight map, against tensors cut by hand and against brute force; no process group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.models.architecture import Experts, Head, ModelError, parse_architecture
from rlhf_megatron.models.families import mixture
from rlhf_megatron.models.weight_map import SCORE, Implementation, megatron_blocks, rollout_blocks, tensor_shapes
from rlhf_megatron.models.weight_source import window
from rlhf_megatron.topology.layout import Layout
from shards import architecture, checkpoint, filled

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


def test_trainer_and_rollout_stack_queries_keys_and_values_alike() -> None:
    a = architecture()
    tensors = checkpoint(a)
    q, k, v = (tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    of_trainer = filled(megatron_blocks(a, Layout(2), 1, "local"), tensors)
    of_rollout = filled(rollout_blocks(a, 2, 1), tensors)
    stacked = torch.cat([q[16:], k[8:], v[8:]])
    assert torch.equal(of_trainer["decoder.layers.0.self_attention.linear_qkv.weight"], stacked)
    assert torch.equal(of_rollout["model.layers.0.self_attn.qkv_proj.weight"], stacked)


def test_vllm_repeats_keys_where_there_are_more_ranks_than_heads() -> None:
    a = architecture(key_value_heads=2)
    tensors = checkpoint(a)
    parameters = filled(rollout_blocks(a, 4, 3), tensors)
    q, k, v = (tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    assert torch.equal(parameters["model.layers.0.self_attn.qkv_proj.weight"], torch.cat([q[24:], k[4:], v[4:]]))


def test_megatron_cuts_through_a_group_where_there_are_more_ranks_than_keys() -> None:
    a = architecture(key_value_heads=2)
    tensors = checkpoint(a)
    q, k, v = (tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    whole = torch.cat(
        [torch.cat([q[g * 16 : g * 16 + 16], k[g * 4 : g * 4 + 4], v[g * 4 : g * 4 + 4]]) for g in (0, 1)]
    )
    for rank, part in enumerate(whole.chunk(4)):
        parameters = filled(megatron_blocks(a, Layout(4), rank, "local"), tensors)
        assert torch.equal(parameters["decoder.layers.0.self_attention.linear_qkv.weight"], part)


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize("stacks", [1, 2])
def test_megatron_stacks_experts(implementation: Implementation, stacks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second expert of the rank that holds experts 2 and 3, or its half of it; one parameter has both, or one."""
    monkeypatch.setattr(mixture, "STACK_ELEMENTS", 2**20 if stacks == 1 else 1)
    a = architecture(experts=4)
    tensors = checkpoint(a)
    gate, up, down = (tensors[f"model.layers.0.mlp.experts.3.{name}_proj.weight"] for name in ("gate", "up", "down"))
    for layout, position, rows in (
        (Layout(data=2, expert=2), 1, slice(0, 8)),
        (Layout(tensor=2, expert=2, expert_tensor=1), 1, slice(0, 8)),
        (Layout(tensor=2, data=2, expert=2), 3, slice(4, 8)),
    ):
        parameters = filled(megatron_blocks(a, layout, position, implementation), tensors)
        first, second = (f"decoder.layers.0.mlp.experts.linear_{name}.weight{stacks - 1}" for name in ("fc1", "fc2"))
        wanted = torch.cat([gate[rows], up[rows]]), down[:, rows]
        for name, matrix in zip((first, second), wanted, strict=True):
            assert torch.equal(parameters[name][-len(matrix) :], matrix)
            assert len(parameters[name]) == len(matrix) * (3 - stacks)
            assert f"{name[:-1]}{stacks}" not in parameters
        router = parameters["decoder.layers.0.mlp.router.weight"]
        assert torch.equal(router, tensors["model.layers.0.mlp.gate.weight"])
        norm = parameters["decoder.layers.0.pre_mlp_layernorm.weight"]
        assert torch.equal(norm, tensors["model.layers.0.post_attention_layernorm.weight"])


@pytest.mark.parametrize(("whole", "experts", "rows"), [(False, range(4), slice(4, 8)), (True, (2, 3), slice(0, 8))])
def test_vllm_stacks_experts(whole: bool, experts: Sequence[int], rows: slice) -> None:
    a = architecture(experts=4)
    tensors = checkpoint(a)
    blocks = rollout_blocks(a, 2, 1, whole)
    parts = {
        name: [tensors[f"model.layers.3.mlp.experts.{expert}.{name}_proj.weight"] for expert in experts]
        for name in ("gate", "up", "down")
    }
    width = rows.stop - rows.start
    stacked = {
        "w13_weight": torch.stack(
            [torch.cat([g[rows], u[rows]]) for g, u in zip(parts["gate"], parts["up"], strict=True)]
        ),
        "w2_weight": torch.stack([down[:, rows] for down in parts["down"]]),
    }
    assert stacked["w13_weight"].shape == (len(experts), 2 * width, 16)
    for name, expected in stacked.items():
        parameter = f"model.layers.3.mlp.experts.routed_experts.{name}"
        found = torch.full_like(expected, torch.nan)
        for block in blocks:
            if block.parameter == parameter:
                source = tensors[block.tensor][tuple(slice(*span) for span in block.region)]
                window(found, block.offset, block.region).copy_(source)
        assert torch.equal(found, expected)


def test_experts_have_coordinates_of_their_own() -> None:
    layout = Layout(tensor=2, pipeline=2, data=4, expert=4, expert_tensor=1)
    assert list(layout.expert_groups_along("expert")) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert list(layout.expert_groups_along("data"))[:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert list(layout.expert_groups_along("tensor")) == [[rank] for rank in range(16)]
    default = Layout(tensor=2, context=2, data=2, expert=2)
    assert default.expert_parts == 2
    assert list(default.expert_groups_along("expert")) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    with pytest.raises(RecipeError, match="expert 4 x expert_tensor 2 = 8 does not divide the 4 ranks"):
        Layout(tensor=2, data=2, expert=4)


def test_layouts_and_experts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="the model is dense"):
        architecture().check_layout(Layout(data=2, expert=2))
    with pytest.raises(ModelError, match="layout.expert=4 does not divide the model's 6 experts"):
        architecture(experts=6).check_layout(Layout(data=4, expert=4))
    with pytest.raises(ModelError, match="layout.expert_tensor=3 does not divide the model's"):
        architecture(experts=6).check_layout(Layout(data=3, expert_tensor=3))
    with pytest.raises(ModelError, match=r"neither divides the model's 2 key-value heads \(.*\) nor is a multiple"):
        dataclasses.replace(architecture(key_value_heads=2), heads=6).check_layout(Layout(tensor=3))
    architecture(key_value_heads=2).check_layout(Layout(tensor=4))


CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "qwen2_audio"),
        ("hidden_act", "gelu"),
        ("mlp_only_layers", [0]),
        ("decoder_sparse_step", 2),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", 5),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 4.0}),
        ("partial_rotary_factor", 0.5),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_what_is_not_supported_is_named(field: str, value: object) -> None:
    assert parse_architecture(CONFIG, "here").experts == Experts(count=8, chosen=2, feed_forward=32, normalized=False)
    with pytest.raises(ModelError, match=rf"^here/config.json: {field}.* is .*, which is not supported; supported: "):
        parse_architecture(CONFIG | {field: value}, "here")
    with pytest.raises(ModelError, match="num_experts is missing"):
        parse_architecture({key: value for key, value in CONFIG.items() if key != "num_experts"}, "here")


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("num_attention_heads", 0, "num_attention_heads is 0; it must be a whole number above 0"),
        ("num_key_value_heads", "two", "num_key_value_heads is 'two'; it must be a whole number above 0"),
        ("num_experts_per_tok", None, "num_experts_per_tok is None; it must be a whole number above 0"),
        ("rope_theta", None, "rope_theta is None; it must be a number above 0"),
        ("rope_parameters", {"rope_type": "llama3", "factor": "x"}, "factor is 'x'; it must be a number above 0"),
        ("rope_parameters", [1], r"rope_parameters must be an object; it is \[1\]"),
    ],
)
def test_what_is_no_number_is_named(field: str, value: object, told: str) -> None:
    with pytest.raises(ModelError, match=f"^here/config.json: {told}$"):
        parse_architecture(CONFIG | {field: value}, "here")


def test_layouts_that_do_not_fit_are_refused_in_one_line() -> None:
    with pytest.raises(ModelError, match="layout.tensor=3 does not divide the model's 8 attention heads"):
        architecture().check_layout(Layout(3))
    with pytest.raises(
        ValueError, match="^layout.pipeline=3: 4 layers do not divide over 3 stages; set first_stage_layers"
    ):
        architecture().check_layout(Layout(1, 3))
    assert Layout(1, 3, first_stage_layers=1, last_stage_layers=1).stage_chunks(4) == [
        [range(0, 1)],
        [range(1, 3)],
        [range(3, 4)],
    ]


@pytest.mark.parametrize("edges", [{}, {"first_stage_layers": 1}, {"first_stage_layers": 1, "last_stage_layers": 1}])
def test_no_stage_is_empty(edges: dict[str, int]) -> None:
    layout = Layout(pipeline=4, **edges)
    for split in (layout.stage_layers, layout.stage_chunks):
        with pytest.raises(RecipeError, match="^layout.pipeline=4: 2 layers do not divide over 4 stages"):
            split(2)
    assert layout.stage_layers(4) == [1, 1, 1, 1]


def test_virtual_stages_take_turns() -> None:
    assert Layout(pipeline=2, virtual_pipeline=2).stage_chunks(8) == [
        [range(0, 2), range(4, 6)],
        [range(2, 4), range(6, 8)],
    ]
    with pytest.raises(
        RecipeError, match="^layout.virtual_pipeline=2 does not divide the layers of every pipeline stage, 3, 3; use"
    ):
        Layout(pipeline=2, virtual_pipeline=2).stage_chunks(6)


def test_coordinates_follow_megatrons_order() -> None:
    layout = Layout(tensor=2, pipeline=2, data=2)
    assert sorted(layout.groups_along("tensor")) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(layout.groups_along("data")) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sorted(layout.groups_along("pipeline")) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    for position in range(8):
        place = layout.coordinates(position)
        assert layout.position(place.tensor, place.data, place.pipeline) == position


QWEN2_MOE = {
    "model_type": "qwen2_moe", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 100,
    "num_key_value_heads": 2, "intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1],
    "decoder_sparse_step": 2,
}  # fmt: skip


MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 100,
    "num_key_value_heads": 2, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


GLM = {
    "model_type": "glm4_moe", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 100,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 2, "use_qk_norm": True,
    "attention_bias": True,
}  # fmt: skip


DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 100,
    "num_key_value_heads": 4, "intermediate_size": 96, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 32, "n_shared_experts": 1, "kv_lora_rank": 32, "q_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}  # fmt: skip


GEMMA4 = {
    "model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 100,
    "num_key_value_heads": 4, "num_global_key_value_heads": 4, "head_dim": 16, "global_head_dim": 32,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "intermediate_size": 96, "enable_moe_block": True,
    "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [QWEN2_MOE, MIXTRAL, GLM, DEEPSEEK, GEMMA4],
    ids=["qwen2_moe", "mixtral", "glm4_moe", "deepseek_v3", "gemma4_text"],
)
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tensor=2),
        Layout(tensor=4),
        Layout(data=2, expert=2),
        Layout(tensor=2, expert=2, expert_tensor=1),
        Layout(pipeline=2, data=2, expert=2),
        Layout(pipeline=3, virtual_pipeline=2),
    ],
    ids=str,
)
def test_layers_that_differ_are_held_once(
    layout: Layout, implementation: Implementation, config: dict[str, Any]
) -> None:
    a = parse_architecture(config, "here")
    if config is QWEN2_MOE:
        assert [kind.feed_forward == "experts" for kind in a.layer_kinds] == [False, False, False, True, False, True]
    elif config is MIXTRAL:
        assert "model.layers.5.block_sparse_moe.experts.3.w2.weight" in tensor_shapes(a)
    a.check_layout(layout)
    tensors = checkpoint(a)
    seen = {name: torch.zeros(shape) for name, shape in tensor_shapes(a).items()}
    for position in range(layout.size):
        if layout.coordinates(position).data and not layout.expert_coordinates(position).expert:
            continue
        blocks = megatron_blocks(a, layout, position, implementation)
        for parameter in filled(blocks, tensors).values():
            assert not parameter.isnan().any()
        for block in blocks:
            if ".experts." in block.tensor or not layout.coordinates(position).data:
                seen[block.tensor][tuple(slice(*span) for span in block.region)] += 1
    whole = (
        *("norm", "mlp.gate.", "moe.gate.", "shared_expert_gate", "q_a_proj", "kv_a_proj", ".router."),
        "layer_scalar",
    )
    for name, count in seen.items():
        assert (count == (layout.tensor if any(part in name for part in whole) else 1)).all(), name


def test_what_vllm_holds_of_a_family_without_a_table_is_not_guessed() -> None:
    with pytest.raises(ValueError, match="qwen2_moe: what vLLM's ranks hold is learned"):
        rollout_blocks(parse_architecture(QWEN2_MOE, "here"), 1, 0)
    with pytest.raises(ModelError, match="layout.tensor=4 does not divide the model's 42 columns of the shared expert"):
        parse_architecture(QWEN2_MOE | {"shared_expert_intermediate_size": 42}, "here").check_layout(Layout(tensor=4))
