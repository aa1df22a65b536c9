"""Heads in EAGLE-3's form: which configs and files are read as what, and which are refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hugging_face import make_model
from rlhf_megatron.errors import ModelError, RecipeError
from rlhf_megatron.models.architecture import Architecture, parse_architecture, read_architecture
from rlhf_megatron.models.draft_heads import (
    auxiliary_layers,
    check_target_layout,
    new_head,
    read_head,
    write_head_config,
)
from rlhf_megatron.models.draft_vocabulary import read_draft_vocabulary, whole_vocabulary
from rlhf_megatron.models.families import FAMILIES
from rlhf_megatron.models.flops import forward_flops
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.rectangles import elements
from rlhf_megatron.models.rope import Rope
from rlhf_megatron.models.weight_map import rollout_blocks, tensor_shapes
from rlhf_megatron.models.weight_source import RandomWeights
from rlhf_megatron.topology.layout import Layout
from small_heads import head_fields, make_head

VOCABULARY, DRAFTED, LAYERS = 250, 90, (1, 2, 3)
_COMMON = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 32000,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "use_cache": True,
}
# The fields of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, and of the heads of Qwen3-235B-A22B and Qwen3-4B that SpecForge
# trains.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | {
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "intermediate_size": 14336,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "vocab_size": 128256,
    },
    "qwen3_moe": _COMMON
    | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 46, 90], "use_aux_hidden_state": True},
        "eos_token_id": 151645,
        "head_dim": 128,
        "intermediate_size": 24576,
        "max_position_embeddings": 40960,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "vocab_size": 151936,
    },
    "qwen3": _COMMON
    | {
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 80,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
TARGETS = {"llama": (32, 4096), "qwen3_moe": (94, 4096), "qwen3": (36, 2560)}
# (layers, heads, key-value heads, size of a head, theta) of each
READ = {
    "llama": ((2, 16, 29), 32, 8, 128, 10_000.0),
    "qwen3_moe": ((1, 46, 90), 64, 4, 128, 1_000_000.0),
    "qwen3": ((2, 18, 33), 32, 8, 80, 1_000_000.0),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_model(tmp_path_factory.mktemp("model") / "model", "qwen3", tied=False, vocabulary=VOCABULARY)
    return folder


@pytest.fixture(scope="module")
def target(model: Path) -> Architecture:
    return read_architecture(model)


def saved(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str, target: Architecture, tmp_path: Path) -> None:
    config = PUBLISHED[name]
    layers, hidden = TARGETS[name]
    other = dataclasses.replace(target, layers=layers, hidden=hidden, vocabulary=config["vocab_size"])
    head = read_head(saved(tmp_path, config), other)
    assert (head.head, head.layers, head.vocabulary) == ("draft", 1, 32000)
    assert head.target_vocabulary == config["vocab_size"]
    read = (head.auxiliary_layers, head.heads, head.key_value_heads, head.head_dim, head.rope.theta)
    assert read == READ[name]
    shapes = tensor_shapes(head)
    assert shapes["fc.weight"] == (hidden, 3 * hidden)
    assert shapes["midlayer.self_attn.k_proj.weight"] == (head.key_value_heads * head.head_dim, 2 * hidden)
    assert shapes["lm_head.weight"] == (32000, hidden)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another class": ({"architectures": ["LlamaForCausalLM"]}, "architectures is .*LlamaForCausalLMEagle3"),
    "another type": ({"model_type": "gpt_oss"}, "model_type is 'gpt_oss'"),
    "an unknown field": ({"target_layers": 3}, "target_layers is 3, which this version does not know"),
    "an unknown field of eagle_config": ({"eagle_config": {"depth": 7}}, r"eagle_config.depth is 7, which"),
    "eagle_config of another kind": ({"eagle_config": 7}, "eagle_config must be an object"),
    "no hidden states": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
    "a norm before fc": ({"norm_before_fc": True}, "norm_before_fc is True"),
    "norms of hidden states": ({"fc_norm": True}, "fc_norm is True"),
    "a residual stream of normed features": ({"norm_before_residual": True}, "norm_before_residual is True"),
    "features that are normed": ({"norm_output": True}, "norm_output is True"),
    "biases": ({"attention_bias": True}, "attention_bias is True"),
    "two layers": ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
    "layers out of order": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 1]}}, r"is \[3, 1\]"),
    "a layer that is not there": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5]}}, "has layer 5"),
    "other states": ({"num_aux_hidden_states": 2}, "num_aux_hidden_states is 2"),
    "a wider model": ({"target_hidden_size": 128}, "target_hidden_size is 128"),
    "the width of another model": ({"hidden_size": 96}, "hidden_size is 96, and that of the model to draft for 64"),
    "the vocabulary of another model": ({"vocab_size": 300}, "vocab_size is 300, and that of the model to draft"),
    "more tokens than there are": ({"draft_vocab_size": 251}, "draft_vocab_size is 251"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_configs(name: str, model: Path, target: Architecture, tmp_path: Path) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        read_head(saved(tmp_path, head_fields(model, DRAFTED, LAYERS) | fields), target)


def test_a_head_is_no_model_of_its_own(model: Path, tmp_path: Path) -> None:
    config = head_fields(model, DRAFTED, LAYERS)
    with pytest.raises(ModelError, match="draft_vocab_size"):
        parse_architecture(config, tmp_path)
    with pytest.raises(ModelError, match="model_type is 'eagle3_head', which is not supported"):
        parse_architecture(config | {"model_type": "eagle3_head"}, tmp_path)


def test_layers_that_are_read_where_nothing_says_so() -> None:
    assert [auxiliary_layers(layers) for layers in (32, 7)] == [(2, 16, 29), (2, 3, 4)]
    for layers in range(1, 40):
        chosen = auxiliary_layers(layers)
        assert len(chosen) == min(layers, 3)
        assert list(chosen) == sorted(set(chosen) & set(range(layers)))


def test_written_configs_are_read_as_the_same(model: Path, target: Architecture, tmp_path: Path) -> None:
    new = new_head(target)
    assert new.auxiliary_layers == (1, 2, 3)
    assert (new.hidden, new.vocabulary, new.rope) == (target.hidden, VOCABULARY, Rope(target.rope.theta))
    write_head_config(tmp_path / "new", new)
    assert read_head(tmp_path / "new", target) == new
    given = saved(tmp_path / "given", head_fields(model, DRAFTED, None))
    head = read_head(given, target)
    write_head_config(tmp_path / "written", head, given)
    assert read_head(tmp_path / "written", target) == head
    written = json.loads((tmp_path / "written" / "config.json").read_text())
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_weights_of_a_new_head(target: Architecture) -> None:
    head = new_head(target)
    drawn = RandomWeights(head, 1, torch.device("cpu"))
    for name, shape in tensor_shapes(head).items():
        tensor = drawn.read(name, ())
        assert tensor.shape == shape
        assert bool((tensor == 1).all()) == ("norm" in name)


def test_operations_are_those_of_all_matrices(target: Architecture) -> None:
    head = new_head(target)
    matrices = sum(math.prod(shape) for shape in tensor_shapes(head).values() if len(shape) == 2)
    attention = FAMILIES[head.family].attention_flops(head, head.layer_kinds[0], [5.0], True)
    assert forward_flops(head, [5.0], 5.0) == 2.0 * matrices * 5.0 + attention


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_ranks_of_vllm_hold_all_of_a_head(tensor: int, target: Architecture) -> None:
    head = new_head(target)
    held = dict.fromkeys(tensor_shapes(head), 0)
    for rank in range(tensor):
        for block in rollout_blocks(head, tensor, rank):
            held[block.tensor] += elements(block.region)
    whole = {name: math.prod(shape) for name, shape in tensor_shapes(head).items()}
    copies = {name: size * tensor for name, size in whole.items() if "norm" in name or name == "fc.weight"}
    shared = max(1, tensor // head.key_value_heads)
    copies |= {name: size * shared for name, size in whole.items() if "k_proj" in name or "v_proj" in name}
    assert held == whole | copies


def test_files_in_the_published_form(model: Path, target: Architecture, tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head", model, DRAFTED, LAYERS)
    stored, head = load_file(folder / "model.safetensors"), read_head(folder, target)
    with CheckpointFiles(folder, head) as files:
        for name in tensor_shapes(head):
            assert torch.equal(files.read(name, ()), stored[name])
    vocabulary = read_draft_vocabulary(folder, head)
    assert torch.equal(vocabulary.target_ids, stored["t2d"].nonzero()[:, 0])
    assert vocabulary.draft_ids[vocabulary.target_ids].tolist() == list(range(DRAFTED))
    assert int((vocabulary.draft_ids < 0).sum()) == VOCABULARY - DRAFTED
    written = vocabulary.tensors()
    assert torch.equal(written["d2t"], stored["d2t"])
    assert torch.equal(written["t2d"], stored["t2d"])


def test_a_whole_vocabulary(model: Path, target: Architecture, tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head", model, VOCABULARY, LAYERS)
    head = read_head(folder, target)
    assert torch.equal(read_draft_vocabulary(folder, head).target_ids, whole_vocabulary(head).target_ids)
    assert not whole_vocabulary(head).offsets.any()


DAMAGED = {
    "none": ({"d2t": None}, "d2t is missing"),
    "too few": ({"d2t": torch.zeros(3, dtype=torch.int64)}, "must have 90 whole numbers"),
    "numbers with a point": ({"d2t": torch.zeros(DRAFTED)}, "must have 90 whole numbers"),
    "twice the same": ({"d2t": -torch.arange(DRAFTED)}, "an id of its own"),
    "beyond the vocabulary": ({"d2t": torch.full((DRAFTED,), 200)}, "an id of its own"),
    "two that disagree": ({"t2d": torch.zeros(VOCABULARY, dtype=torch.bool)}, "do not name the same tokens"),
    "embeddings": ({"embed_tokens.weight": torch.zeros(VOCABULARY, 64)}, "embeddings of their own"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_refused_vocabularies(name: str, model: Path, target: Architecture, tmp_path: Path) -> None:
    changed, message = DAMAGED[name]
    folder = make_head(tmp_path / "head", model, DRAFTED, LAYERS)
    tensors = load_file(folder / "model.safetensors") | changed
    save_file({key: value for key, value in tensors.items() if value is not None}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        read_draft_vocabulary(folder, read_head(folder, target))


def test_an_order_of_a_whole_vocabulary_is_refused(model: Path, target: Architecture, tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head", model, VOCABULARY, LAYERS)
    order = torch.arange(VOCABULARY).flip(0) - torch.arange(VOCABULARY)
    save_file(load_file(folder / "model.safetensors") | {"d2t": order}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="order of a whole vocabulary"):
        read_draft_vocabulary(folder, read_head(folder, target))


def test_pipelines_are_refused() -> None:
    check_target_layout(Layout(tensor=2, context=2))
    with pytest.raises(RecipeError, match=r"actor\.layout\.pipeline=2: .*set actor\.layout\.pipeline to 1"):
        check_target_layout(Layout(pipeline=2))
