"""Checkpoints whose experts are stacked, transposed or in MXFP4, against transformers' own reading of the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hugging_face import load_model, make_model
from rlhf_megatron.models.architecture import ModelError, read_architecture
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.mxfp4 import unpacked
from rlhf_megatron.models.stacked import stored_shapes, stored_tensors
from rlhf_megatron.models.weight_map import stacked_tensors, tensor_shapes

FILE = "model.safetensors"
EXPERTS = "model.layers.1.mlp.experts."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("stacked") / "model", "gpt_oss", tied=False)


def packed(folder: Path, target: Path) -> Path:
    """Return the same model with random weights of experts in MXFP4."""
    tensors, generator = load_file(folder / FILE), torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        blocks = (count, rows, columns // 32, 16)
        tensors[name + "_blocks"] = torch.randint(256, blocks, dtype=torch.uint8, generator=generator)
        tensors[name + "_scales"] = torch.randint(118, 124, blocks[:-1], dtype=torch.uint8, generator=generator)
    target.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / FILE, metadata={"format": "pt"})
    return target


def test_parts_read_from_files_make_the_files_again(folder: Path) -> None:
    architecture, held = read_architecture(folder), load_file(folder / FILE)
    shapes, stacked = tensor_shapes(architecture), stacked_tensors(architecture)
    assert stored_shapes(shapes, stacked) == {name: tuple(tensor.shape) for name, tensor in held.items()}
    with CheckpointFiles(folder, architecture) as files:
        again = dict(stored_tensors(((name, files.read(name, ())) for name in shapes), stacked))
        piece = files.read(EXPERTS + "2.gate_up_proj.weight", ((3, 7), (10, 50)))
    assert again.keys() == held.keys() and all(torch.equal(again[name], held[name]) for name in held)
    assert torch.equal(piece, held[EXPERTS + "gate_up_proj"][2, 10:50, 3:7].t())


def test_a_stack_without_all_of_its_parts_is_an_error(folder: Path) -> None:
    stacked = stacked_tensors(read_architecture(folder))
    with pytest.raises(ValueError, match=r"^parts of model\.layers\.1\.mlp\.experts\.down_proj are missing$"):
        list(stored_tensors([(EXPERTS + "0.down_proj.weight", torch.zeros(2, 2))], stacked))


def test_mxfp4_is_unpacked_as_transformers_unpacks_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (3, 5, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(90, 160, (3, 5, 4), dtype=torch.uint8, generator=generator)
    theirs: Tensor = convert_moe_packed_tensors(blocks, scales)
    ours = unpacked(blocks, scales)
    assert ours.dtype == torch.bfloat16 and torch.equal(ours.transpose(1, 2), theirs)


def test_files_in_mxfp4_are_read_as_transformers_reads_them(folder: Path, tmp_path: Path) -> None:
    target = packed(folder, tmp_path / "packed")
    theirs = load_model(target).state_dict()  # without a GPU transformers dequantises too
    with CheckpointFiles(target, read_architecture(target)) as files:
        for stack, part in (("gate_up_proj", "gate_up_proj"), ("down_proj", "down_proj")):
            whole = theirs[EXPERTS + stack][3].t()
            read = files.read(f"{EXPERTS}3.{part}.weight", ())
            assert read.dtype == torch.bfloat16 and torch.equal(read.float(), whole)
            rows, columns = (5, 9), (33, 61)
            piece = files.read(f"{EXPERTS}3.{part}.weight", (rows, columns))
            assert torch.equal(piece.float(), whole[slice(*rows), slice(*columns)])
        assert files.where(EXPERTS + "3.down_proj.weight") == str(target / FILE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(EXPERTS + "down_proj_scales"), "the first is .*experts.down_proj_scales"),
        (
            lambda tensors: tensors.update({EXPERTS + "down_proj_scales": torch.zeros(4, 64, 3)}),
            "has numbers of type F32, and those of MXFP4 are U8",
        ),
        (
            lambda tensors: tensors.update({EXPERTS + "down_proj_blocks": torch.zeros(4, 64, 2, 16).byte()}),
            r"has shape \(4, 64, 2, 16\), config.json asks for \(4, 64, 3, 16\)",
        ),
    ],
)
def test_damaged_files_in_mxfp4_are_refused(folder: Path, tmp_path: Path, change: object, said: str) -> None:
    target = packed(folder, tmp_path / "packed")
    tensors = load_file(target / FILE)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, target / FILE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=said):
        CheckpointFiles(target, read_architecture(target))
