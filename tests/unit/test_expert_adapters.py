"""Adapters of experts in PEFT's files: what PEFT makes of them, what vLLM's loader does, and what is read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from hugging_face import load_model, make_model
from rlhf_megatron.models.architecture import ModelError, read_architecture
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.lora import Adaptation, adapted_shapes, factor_of, factor_shapes, module_of
from rlhf_megatron.models.peft_files import PEFT_WEIGHTS, PeftAdapter, write_peft
from rlhf_megatron.models.weight_map import is_expert, whole_blocks
from rlhf_megatron.recipe import LoraSection

RANK = 3
FAMILIES = [
    "qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_next", "qwen3_vl_moe",
    "qwen3_5_moe", "gemma4_text_experts", "gemma4:experts",
]  # fmt: skip
ALL = Adaptation.of(LoraSection(rank=RANK, alpha=2 * RANK))


def drawn_factors(folder: Path) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = factor_shapes(read_architecture(folder), ALL)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_merges_what_was_written(family: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", family)
    architecture, factors = read_architecture(folder), drawn_factors(folder)
    write_peft(tmp_path / "adapter", factors.items(), architecture, ALL, str(folder))
    merged = PeftModel.from_pretrained(load_model(folder), tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    adapted = adapted_shapes(architecture, ALL)
    with CheckpointFiles(folder, architecture) as base, CheckpointFiles(tmp_path / "merged", architecture) as found:
        for block in whole_blocks(architecture):
            expected = base.read(block.tensor, block.region)
            if block.tensor in adapted:
                down, up = factors[factor_of(block.tensor, "A")], factors[factor_of(block.tensor, "B")]
                expected = expected + 2 * up @ down
            torch.testing.assert_close(found.read(block.tensor, block.region), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "qwen3_5_moe", "gemma4:experts"])
def test_what_was_written_is_read_back(family: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", family)
    architecture, factors = read_architecture(folder), drawn_factors(folder)
    write_peft(tmp_path / "adapter", factors.items(), architecture, ALL, str(folder))
    source = PeftAdapter(tmp_path / "adapter", architecture, ALL)
    for name, value in factors.items():
        assert torch.equal(source.read(name, tuple((0, size) for size in value.shape)), value)


def test_gate_and_up_of_one_a_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3_5_moe")
    architecture, factors = read_architecture(folder), drawn_factors(folder)
    write_peft(tmp_path / "adapter", factors.items(), architecture, ALL, str(folder))
    stored = load_file(tmp_path / "adapter" / PEFT_WEIGHTS)
    name = "base_model.model.model.language_model.layers.1.mlp.experts.base_layer.lora_B.weight"
    for shared in (stored[name] + 1, stored[name][:, ::2].contiguous()):
        save_file(stored | {name: shared}, tmp_path / "adapter" / PEFT_WEIGHTS)
        with pytest.raises(ModelError, match="gate and up share an A"):
            PeftAdapter(tmp_path / "adapter", architecture, ALL)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_5_moe"])
def test_vllm_s_loader_takes_it(family: str, tmp_path: Path) -> None:
    """Adapters of single experts, and of all in one where vLLM's model has them so; the layers themselves need GPUs."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    folder = make_model(tmp_path / "model", family)
    architecture, factors = read_architecture(folder), drawn_factors(folder)
    write_peft(tmp_path / "adapter", factors.items(), architecture, ALL, str(folder))
    modules = {module_of(name) for name in adapted_shapes(architecture, ALL) if not is_expert(name)}
    parts = ("gate_proj", "up_proj", "down_proj")
    single = {f"experts.{expert}.{part}" for expert in range(4) for part in parts}
    modules |= single if family == "qwen3_moe" else {"experts"}
    helper = PEFTHelper.from_local_dir(str(tmp_path / "adapter"), None)
    loaded = LoRAModel.from_local_checkpoint(str(tmp_path / "adapter"), modules, helper, device="cpu")
    assert all(layer.scaling == 2 for layer in loaded.loras.values())
    if family == "gpt_oss":
        both = loaded.loras["model.layers.1.mlp.experts.base_layer"]
        # As vLLM takes them apart: (experts, rank, columns) and (rows, rank, experts).
        down, up = both.lora_a.reshape(4, RANK, -1)[2], both.lora_b.reshape(len(both.lora_b), -1, 4)[..., 2]
        name = "model.layers.1.mlp.experts.2.gate_up_proj."
    elif family == "qwen3_5_moe":
        both = loaded.loras["model.language_model.layers.1.mlp.experts.base_layer"]
        downs, ups = both.lora_a.reshape(4, 2 * RANK, -1)[2], both.lora_b.reshape(len(both.lora_b), -1, 4)[..., 2]
        rows = len(ups) // 2
        assert not ups[:rows, RANK:].any() and not ups[rows:, :RANK].any()
        down, up, name = downs[RANK:], ups[rows:, RANK:], "model.layers.1.mlp.experts.2.up_proj."
    else:
        layer = loaded.loras["model.layers.1.mlp.experts.2.up_proj"]
        down, up, name = layer.lora_a, layer.lora_b, "model.layers.1.mlp.experts.2.up_proj."
    assert torch.equal(down, factors[name + "lora_A.weight"]) and torch.equal(up, factors[name + "lora_B.weight"])
