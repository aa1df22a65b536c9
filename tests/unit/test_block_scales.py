"""Weights in 8 bits with a scale for each block: read as their makers' formula says, by any rectangle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hugging_face import make_model
from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.models.hf_export import Companions, write_checkpoint
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.weight_map import tensor_shapes

ROWS, COLUMNS = 16, 24
CONFIG = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [ROWS, COLUMNS],
}  # fmt: skip


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in e4m3 and the scales of its blocks, as they are made: the largest of a block becomes 448."""
    scales = torch.empty(-(-weight.size(0) // ROWS), -(-weight.size(1) // COLUMNS))
    numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for row in range(scales.size(0)):
        for column in range(scales.size(1)):
            place = slice(row * ROWS, (row + 1) * ROWS), slice(column * COLUMNS, (column + 1) * COLUMNS)
            scales[row, column] = weight[place].abs().max() / 448
            numbers[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
    return numbers, scales


def published(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return DeepSeek's weight_dequant (inference/kernel.py), one number at a time."""
    rows, columns = torch.arange(numbers.size(0)) // ROWS, torch.arange(numbers.size(1)) // COLUMNS
    return numbers.float() * scales[rows[:, None], columns[None]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return quantized_model(tmp_path / "model")


def quantized_model(folder: Path) -> Path:
    """Return a model whose linear layers are quantised; the rows of some are no multiple of a block's."""
    made = make_model(folder, "deepseek_v3", num_hidden_layers=2)
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(made / "model.safetensors").items():
        tensors[name] = value
        if name.endswith("_proj.weight") or name.endswith("with_mqa.weight"):
            tensors[name], tensors[name + "_scale_inv"] = quantized(value)
    save_file(tensors, made / "model.safetensors")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return made


def test_rectangles_are_numbers_times_the_scales_of_their_blocks(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    with CheckpointFiles(folder, read_architecture(folder)) as files:
        scaled = [name for name in stored if name + "_scale_inv" in stored]
        assert len(scaled) == 40 and any(stored[name].size(0) % ROWS for name in scaled)
        for name in scaled:
            whole = published(stored[name], stored[name + "_scale_inv"])
            assert torch.equal(files.read(name, ()), whole)
            rows, columns = whole.shape
            for region in (
                ((3, rows - 2), (5, columns - 1)),
                ((ROWS, rows), (0, COLUMNS)),
                ((1, 2), (columns - 1, columns)),
            ):
                assert torch.equal(files.read(name, region), whole[tuple(slice(*span) for span in region)])


def test_transformers_reads_the_same_numbers(folder: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored = load_file(folder / "model.safetensors")
    with CheckpointFiles(folder, read_architecture(folder)) as files:
        for name in stored:
            scales = stored.get(name + "_scale_inv")
            if scales is not None and not stored[name].size(0) % ROWS and not stored[name].size(1) % COLUMNS:
                theirs = Fp8Dequantize(None)._dequantize_one(stored[name], scales, torch.float32)
                assert torch.equal(files.read(name, ()), theirs)


def test_a_matrix_with_one_scale_is_its_numbers_times_that(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        stored[name] = torch.rand(())
        stored[name.replace("weight_scale_inv", "activation_scale")] = torch.rand(())
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    quantization = CONFIG | {"weight_block_size": None, "activation_scheme": "static", "dequantize": False}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with CheckpointFiles(folder, read_architecture(folder)) as files:
        for name in [name for name in stored if name + "_scale_inv" in stored]:
            whole = stored[name].float() * stored[name + "_scale_inv"]
            assert torch.equal(files.read(name, ()), whole)
            assert torch.equal(files.read(name, ((3, 7), (5, 9))), whole[3:7, 5:9])


def test_an_export_is_not_quantised(folder: Path, tmp_path: Path) -> None:
    architecture = read_architecture(folder)
    with CheckpointFiles(folder, architecture) as files:
        tensors = [(name, files.read(name, ()).bfloat16()) for name in tensor_shapes(architecture)]
    write_checkpoint(tmp_path / "exported", Companions(folder), tensors, torch.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "exported/config.json").read_text())
    with CheckpointFiles(tmp_path / "exported", read_architecture(tmp_path / "exported")) as files:
        assert all(torch.equal(files.read(name, ()), value) for name, value in tensors)


def test_other_quantisations_and_scales_that_do_not_fit_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for other in ({"fmt": "e5m2"}, {"quant_method": "gptq"}, {"weight_block_size": None}, {"bits": 4}):
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG | other}))
        with pytest.raises(ModelError, match="quantization_config is "):
            read_architecture(folder)
    wide = CONFIG | {"weight_block_size": [ROWS, COLUMNS // 2]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": wide}))
    with pytest.raises(ModelError, match=r"weight_scale_inv has shape .*, quantization_config asks for "):
        CheckpointFiles(folder, read_architecture(folder))
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "quantization_config"}))
    with pytest.raises(ModelError, match="F8_E4M3"):
        CheckpointFiles(folder, read_architecture(folder))
