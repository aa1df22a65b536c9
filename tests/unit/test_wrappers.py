"""Models of images and text: config.json at both levels, and what becomes of the other towers' weights."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from hugging_face import load_model, make_model, random_rows, row_logprobs, transpose_experts
from published_configs import PUBLISHED
from rlhf_megatron.models.architecture import ModelError, parse_architecture, read_architecture, wrapped_language
from rlhf_megatron.models.families.wrappers import WRAPPERS
from rlhf_megatron.models.hf_export import Companions, export_form, write_checkpoint
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.lora import Adaptation, factor_shapes
from rlhf_megatron.models.peft_files import PeftAdapter, write_peft
from rlhf_megatron.models.rope import Rope
from rlhf_megatron.models.weight_map import tensor_shapes
from rlhf_megatron.planning.dry_run import dry_run
from rlhf_megatron.recipe import load_recipe
from rlhf_megatron.rollout.vllm.model_config import config_arguments

GEMMA = PUBLISHED["gemma-3-4b-it"]


def read_again(folder: Path, target: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Export the model of ``folder`` as it is."""
    architecture = read_architecture(folder)
    with CheckpointFiles(folder, architecture) as files:
        tensors = ((name, files.read(name, ()).to(dtype)) for name in tensor_shapes(architecture))
        form = export_form(Companions(folder), architecture)
        write_checkpoint(target, Companions(folder), form.stored(tensors), dtype)
    return target


def stack_experts(folder: Path) -> None:
    """Rewrite the files of a mixture as published: all experts' matrices of a layer in two tensors."""
    tensors = load_file(folder / "model.safetensors")
    for layer in range(4):
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        of = [[tensors.pop(f"{prefix}{e}.{m}_proj.weight") for m in ("gate", "up", "down")] for e in range(4)]
        tensors[prefix + "gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in of])
        tensors[prefix + "down_proj"] = torch.stack([down for *_, down in of])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_the_language_model_is_that_of_text_config() -> None:
    a = parse_architecture(GEMMA, "here")
    assert (a.family, a.vocabulary, a.heads, a.key_value_heads, a.head_dim) == ("gemma3_text", 262208, 8, 4, 256)
    assert a.tied_embeddings and a.end_token_ids == (1, 106)
    assert parse_architecture(PUBLISHED["Qwen3.5-35B-A3B"], "here") == parse_architecture(
        PUBLISHED["Qwen3.5-35B-A3B, its language model"], "here"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_seq_length": 256}, "image_seq_length is 256, which this version does not know"),
        ({"image_token_index": "x"}, "image_token_index is 'x'; it must be a whole number"),
        ({"hidden_size": 64}, "hidden_size is 64, and text_config does not say so; remove it"),
        ({"architectures": ["Gemma3ForSequenceClassification"]}, "architectures is .*Gemma3ForConditionalGeneration"),
        ({"text_config": None}, "text_config is None"),
        ({"text_config": {"model_type": "llama"}}, "text_config's model_type is 'llama'"),
        (
            {"tie_word_embeddings": False, "text_config": GEMMA["text_config"] | {"tie_word_embeddings": True}},
            "tie_word_embeddings is False, and True in text_config",
        ),
        ({"text_config": GEMMA["text_config"] | {"hidden_activation": "relu"}}, "hidden_activation is 'relu'"),
    ],
)
def test_fields_of_either_level_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_architecture(GEMMA | change, "here")


QWEN = PUBLISHED["Qwen2.5-VL-7B-Instruct"]
KIMI = PUBLISHED["Kimi-K2.5, not quantised"]
INT4 = {"quantization_config": {"format": "pack-quantized", "quant_method": "compressed-tensors"}}
BOTH = PUBLISHED["Qwen2.5-VL-3B, saved by transformers 4.52"]
GLM_4_1V = {
    "architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v", "image_token_id": 151343,
    "text_config": {
        "attention_bias": True, "eos_token_id": [151329, 151336, 151338, 151348], "hidden_size": 4096,
        "image_token_id": 151343, "intermediate_size": 13696, "max_position_embeddings": 65536,
        "model_type": "glm4v_text", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"}, "rope_theta": 10000.0,
        "vocab_size": 151552,
    },
    "vision_config": {"depth": 24, "hidden_size": 1536},
}  # fmt: skip


def test_positions_of_images_are_those_of_a_text() -> None:
    a = parse_architecture(QWEN, "here")
    assert (a.family, a.layers, a.hidden, a.qkv_bias, a.norm_epsilon) == ("qwen2", 28, 3584, True, 1e-6)
    assert a.rope == Rope(1e6) and not a.tied_embeddings
    assert parse_architecture(GLM_4_1V, "here").rope == Rope(1e4, None, 0.5, interleaved=True)
    long = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "mrope_section": [16, 24, 24]}
    plain = {field: value for field, value in long.items() if field != "mrope_section"}
    language = PUBLISHED["Qwen2.5-7B-Instruct"]
    assert (
        parse_architecture(QWEN | {"rope_scaling": long}, "here").rope
        == parse_architecture(language | {"rope_scaling": plain}, "here").rope
    )


def test_fields_of_both_levels_are_read_from_text_config() -> None:
    assert parse_architecture(BOTH, "here").tied_embeddings  # which text_config alone says
    assert parse_architecture(BOTH | {"tie_word_embeddings": False}, "here").tied_embeddings
    assert parse_architecture(BOTH | {"sliding_window": None}, "here") == parse_architecture(BOTH, "here")


@pytest.mark.parametrize(
    "name",
    [name for name, each in PUBLISHED.items() if each["model_type"] in WRAPPERS and name != "gemma-4-E2B-it"],
)
def test_a_config_that_transformers_saves_again_is_of_the_same_model(name: str, tmp_path: Path) -> None:
    published = {field: value for field, value in PUBLISHED[name].items() if field != "quantization_config"}
    AutoConfig.for_model(**copy.deepcopy(published)).save_pretrained(tmp_path)
    read, again = parse_architecture(published, "here"), read_architecture(tmp_path)
    # It writes its defaults into the file, also of tokens.
    tokens = {"end_token_ids": again.end_token_ids, "pad_token_id": again.pad_token_id}
    assert dataclasses.replace(read, **tokens) == again


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (QWEN, {"hidden_act": "gelu"}, r"^here/config.json: hidden_act is 'gelu'"),
        (QWEN, {"head_dim": 64}, "head_dim is 64, .*hidden_size / num_attention_heads, 128"),
        (QWEN, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, r"mrope_section is \[16, 24\]"),
        (QWEN, {"rope_scaling": {"type": "su", "mrope_section": [16, 24, 24]}}, "rope_scaling.rope_type is 'su'"),
        (PUBLISHED["Qwen3.6-27B"], {"language_model_only": True}, "language_model_only is True, .*; supported: False"),
        (KIMI, {"text_config": KIMI["text_config"] | INT4}, "quantization_config is .*supported: none, or fp8"),
        (KIMI, {"architectures": ["Kimi_K25ForConditionalGeneration"]}, "architectures is .*KimiK25ForConditional"),
        (BOTH, {"num_hidden_layers": 35}, "num_hidden_layers is 35, and text_config does not say so"),
        (GLM_4_1V, {"text_config": GLM_4_1V["text_config"] | {"attention_bias": False}}, "attention_bias is False"),
        (
            PUBLISHED["Qwen3-VL-30B-A3B-Instruct"],
            {"text_config": PUBLISHED["Qwen3-VL-30B-A3B-Instruct"]["text_config"] | {"norm_topk_prob": False}},
            "norm_topk_prob is False, which is not supported; supported: True",
        ),
    ],
)
def test_what_transformers_would_not_read_is_refused(
    config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        parse_architecture(config | change, "here")


@pytest.mark.parametrize("family", sorted(WRAPPERS))
def test_an_export_is_the_whole_model_bit_for_bit(family: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", family, tied=family == "gemma3")
    if family == "qwen3_5_moe":
        stack_experts(folder)
    tensors = load_file(folder / "model.safetensors")
    if family.startswith("qwen3_5"):
        tensors["mtp.norm.weight"] = torch.rand(64)
    save_file({**tensors, **_halved(tensors)}, folder / "model.safetensors", {"format": "pt"})
    exported = read_again(folder, tmp_path / "exported")
    before, after = (load_file(path / "model.safetensors") for path in (folder, exported))
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)
    loaded = load_model(exported)
    assert type(loaded) is type(load_model(folder))
    assert loaded.config.tie_word_embeddings == loaded.config.text_config.tie_word_embeddings == (family == "gemma3")


def test_experts_are_read_and_exported_as_they_lie(tmp_path: Path) -> None:
    published = make_model(tmp_path / "published", "qwen3_vl_moe", moe_intermediate_size=40)
    saved = Path(shutil.copytree(published, tmp_path / "saved"))
    transpose_experts(saved)  # as transformers itself saves them
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    shapes, exports = [], []
    for folder in (published, saved):
        exports.append(read_again(folder, tmp_path / f"{folder.name}, exported"))
        shapes.append(tuple(load_file(exports[-1] / "model.safetensors")[name].shape))
    assert shapes == [(4, 64, 80), (4, 80, 64)]
    first, second = (load_model(folder).state_dict() for folder in exports)
    assert all(torch.equal(first[name], second[name]) for name in first)
    architecture = read_architecture(published)
    part, region = "model.layers.1.mlp.experts.2.up_proj.weight", ((3, 7), (10, 50))
    with CheckpointFiles(published, architecture) as one, CheckpointFiles(saved, architecture) as other:
        piece = one.read(part, region)
        assert torch.equal(piece, other.read(part, region))
    assert torch.equal(piece, load_file(saved / "model.safetensors")[name][2, 43:47, 10:50])


def _halved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the towers' tensors in bfloat16, a type that is not the run's."""
    return {name: t.bfloat16() for name, t in tensors.items() if "vis" in name or "projector" in name}


def test_names_of_modules_are_read_and_exported_too(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "gemma3")
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        f"model.{name}".replace("model.language_model.model.", "model.language_model."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    exported = read_again(folder, tmp_path / "exported")
    assert load_file(exported / "model.safetensors").keys() == renamed.keys()


def test_a_quantised_tower_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "gemma3")
    tensors = load_file(folder / "model.safetensors")
    name = "multi_modal_projector.mm_soft_emb_norm.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"{name} has numbers of type F8_E4M3"):
        CheckpointFiles(folder, read_architecture(folder))


def test_a_critic_or_drawn_weights_are_exported_as_the_language_model_alone(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "gemma3")
    architecture = read_architecture(folder).with_head("scalar")
    with CheckpointFiles(folder, architecture, 1) as files:
        tensors = [(name, files.read(name, ())) for name in tensor_shapes(architecture)]
    form = export_form(Companions(folder), architecture)
    write_checkpoint(tmp_path / "critic", Companions(folder), form.stored(tensors), torch.float32, head="scalar")
    written = json.loads((tmp_path / "critic/config.json").read_text())
    assert written["architectures"] == ["Gemma3TextForSequenceClassification"]
    assert read_architecture(tmp_path / "critic").with_head("scalar") == architecture
    (folder / "model.safetensors").unlink()
    form = export_form(Companions(folder), read_architecture(folder))
    write_checkpoint(tmp_path / "drawn", Companions(folder), form.stored(tensors[:-1]), torch.float32)
    assert read_architecture(tmp_path / "drawn") == read_architecture(folder)


def test_adapters_have_the_names_of_peft(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "gemma3")
    architecture, adaptation = read_architecture(folder), Adaptation(2, 3.0, ("q_proj", "v_proj"))
    factors = {name: torch.randn(shape) for name, shape in factor_shapes(architecture, adaptation).items()}
    write_peft(tmp_path / "adapter", factors.items(), architecture, adaptation, str(folder))
    source = PeftAdapter(tmp_path / "adapter", architecture, adaptation)
    assert all(torch.equal(source.read(name, ()), factors[name]) for name in factors)
    adapted = PeftModel.from_pretrained(load_model(folder), tmp_path / "adapter")
    held = {name: parameter for name, parameter in adapted.named_parameters() if "lora_" in name}
    assert len(held) == len(factors)  # none in the vision tower
    plain = load_model(folder)
    for name in {name.rsplit(".", 2)[0] for name in factors}:
        weight = plain.get_parameter(name.replace("model.", "model.language_model.", 1) + ".weight")
        weight.data += 3.0 * factors[f"{name}.lora_B.weight"] @ factors[f"{name}.lora_A.weight"]
    (prompt, *_), (response, *_) = random_rows(1, 250)
    with torch.no_grad():
        difference = row_logprobs(adapted, prompt, response) - row_logprobs(plain, prompt, response)
    assert difference.abs().max() < 1e-5


def test_vllm_is_given_the_language_model(tmp_path: Path) -> None:
    from transformers import AutoConfig, PreTrainedConfig

    folder = make_model(tmp_path / "model", "mistral3", tied=False)
    arguments = config_arguments(folder, wrapped_language(folder))
    config = arguments["hf_overrides"](AutoConfig.from_pretrained(folder))
    assert (config.model_type, config.architectures) == ("mistral", ["MistralForCausalLM"])
    assert not hasattr(config, "vision_config") and config.tie_word_embeddings is False
    unknown = PreTrainedConfig(model_type="dummy_mistral3")
    assert arguments["hf_overrides"](unknown) is unknown


def test_a_plan_counts_the_language_model_alone(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes/qwen7b_grpo.yaml"
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    planned = dry_run(load_recipe(recipe, [f"model.path={tmp_path}", f"model.config={tmp_path}"]), 8)
    assert "3,880,263,168 parameters" in planned
    assert "of gemma3 the language model is loaded; exports have the other towers as they were" in planned
