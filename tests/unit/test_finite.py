"""Weights that are not finite, or no weights at all, where they are read and where they are written."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hugging_face import make_model
from rlhf_megatron.models.architecture import ModelError, read_architecture
from rlhf_megatron.models.hf_export import Companions, write_checkpoint
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.lora import Adaptation, factor_shapes
from rlhf_megatron.models.peft_files import PEFT_WEIGHTS, PeftAdapter, peft_config
from rlhf_megatron.models.weight_map import whole_blocks
from rlhf_megatron.models.weight_source import load_blocks
from rlhf_megatron.recipe import LoraSection
from rlhf_megatron.runtime.finite import BadTensor, NotFiniteError, are_finite, nonfinite, only_finite

NAN, INF = math.nan, math.inf
NAMES = {"embeddings": "model.embed_tokens.weight", "norm": "model.layers.1.input_layernorm.weight"}
Change = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """Return the model's config without its weights."""
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    return tmp_path


def read(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return every tensor of a model folder, in a parameter of its own name and of this type."""
    architecture = read_architecture(folder)
    blocks = whole_blocks(architecture)
    parameters = {block.parameter: torch.empty([stop for _, stop in block.region], dtype=dtype) for block in blocks}
    with CheckpointFiles(folder, architecture) as files:
        load_blocks(blocks, parameters, files)
    return parameters


def refusal(folder: Path, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(ModelError) as caught:
        read(folder, dtype)
    text = str(caught.value)
    assert text.isprintable() and text.startswith(str(folder))
    return text


def put(value: float) -> Change:
    """Write a number into three places."""

    def change(weights: Tensor) -> Tensor:
        weights.view(-1)[[0, 5, -1]] = value
        return weights

    return change


# ---- tensors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_one_number_that_is_not_finite_shows_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    for size in (1, 7, 64, 1003):
        for place in {0, size // 2, size - 1}:
            tensor = torch.zeros(size, dtype=dtype)
            tensor[place] = bad
            extremes = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
            assert are_finite([extremes, tensor, -extremes, torch.empty(0)]) == [True, False, True, True]


def test_bad_tensors_are_counted_and_in_their_order() -> None:
    named = {"a": torch.tensor([[NAN, 1.0], [INF, -INF]]), "b": torch.ones(3), "c": torch.tensor(NAN)}
    assert nonfinite(named.items()) == [BadTensor("a", nan=1, infinite=2, elements=4), BadTensor("c", 1, 0, 1)]
    assert nonfinite({}.items()) == []


# ---- reading


@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_weights_that_are_not_finite_are_refused_by_name(model: Path, folder: Path, which: str, value: float) -> None:
    name, weights = NAMES[which], load_file(model / "model.safetensors")
    save_file(weights | {name: put(value)(weights[name])}, folder / "model.safetensors")
    assert refusal(folder) == (
        f"{folder}/model.safetensors: {name} holds 3 values that are not finite (NaN or infinity); download the model "
        "again"
    )


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_numbers_that_are_no_weights_are_not_cast(model: Path, folder: Path, dtype: torch.dtype) -> None:
    name, weights = NAMES["norm"], load_file(model / "model.safetensors")
    save_file(weights | {name: weights[name].to(dtype)}, folder / "model.safetensors")
    assert f"model.safetensors: {name} has numbers of type " in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_numbers_of_each_type_that_weights_have_are_read(model: Path, folder: Path, dtype: torch.dtype) -> None:
    weights = {name: each.to(dtype) for name, each in load_file(model / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    assert all(torch.equal(each, weights[name].float()) for name, each in read(folder).items())


@pytest.mark.parametrize(
    ("value", "dtype", "largest"),
    [
        (1e39, torch.float32, "3.4e+38, the largest of float32"),
        (3.4e38, torch.bfloat16, "3.39e+38, the largest of bfloat16"),
        (65520.0, torch.float16, "6.55e+04, the largest of float16"),
    ],
)
def test_what_the_runs_type_cannot_hold_is_told_from_what_is_damaged(
    model: Path, folder: Path, value: float, dtype: torch.dtype, largest: str
) -> None:
    name, weights = NAMES["embeddings"], load_file(model / "model.safetensors")
    save_file(weights | {name: put(value)(weights[name].double())}, folder / "model.safetensors")
    assert f"{name} holds 3 values beyond {largest}; set model.dtype to a type that has them" in refusal(folder, dtype)
    read(folder, torch.float64)


def edited(content: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return a safetensors file with another header."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change(header)
    written = json.dumps(header).encode()
    return struct.pack("<Q", len(written)) + written + content[8 + length :]


def overlap(header: dict[str, Any]) -> None:
    names = [name for name in header if name != "__metadata__"]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]


def with_norm(**fields: Any) -> Callable[[bytes], bytes]:
    """Say something else of one tensor."""
    return lambda content: edited(content, lambda header: header[NAMES["norm"]].update(fields))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "seven bytes": lambda content: content[:7],
    "cut": lambda content: content[:-100],
    "longer": lambda content: content + b"\0" * 100,
    "another kind of file": lambda content: b"PK\x03\x04" + content[4:],
    "a header beyond the file": lambda content: struct.pack("<Q", 1 << 40) + content[8:],
    "a header beyond memory": lambda content: struct.pack("<Q", (1 << 64) - 1) + content[8:],
    "a deep header": lambda content: struct.pack("<Q", 100_000) + b"[" * 100_000,
    "tensors over each other": lambda content: edited(content, overlap),
    "offsets below 0": with_norm(data_offsets=[-4, 0]),
    "offsets beyond the file": with_norm(data_offsets=[0, 1 << 60]),
    "a shape beyond memory": with_norm(shape=[1 << 40, 1 << 40]),
    "an unknown type": with_norm(dtype="F99"),
    "another name": lambda content: edited(content, lambda h: h.update({"a\n\x1b[31m": h.pop(NAMES["norm"])})),
    "another shape": with_norm(shape=[1, 64]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_in_one_line(model: Path, folder: Path, damage: str) -> None:
    (folder / "model.safetensors").write_bytes(DAMAGE[damage]((model / "model.safetensors").read_bytes()))
    refusal(folder)


def test_a_file_that_is_none_is_not_waited_for(model: Path, folder: Path) -> None:
    names = load_file(model / "model.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "pipe.safetensors")})
    )
    assert refusal(folder).startswith(f"{folder}/pipe.safetensors: is not a regular file (a pipe)")


def test_a_tensor_that_its_file_lacks_is_told(model: Path, folder: Path) -> None:
    weights = load_file(model / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(weights, "model.safetensors")})
    )
    del weights[NAMES["norm"]]
    save_file(weights, folder / "model.safetensors")
    assert f"{NAMES['norm']} is not there, and " in refusal(folder)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (put(NAN), "is not finite; train the adapter anew"),
        (put(INF), "is not finite; train the adapter anew"),
        (lambda each: each.to(torch.int32), "has numbers of type I32"),
        (lambda each: each.to(torch.float8_e4m3fn), "has numbers of type F8_E4M3"),
    ],
)
def test_adapters_are_weights_as_others(model: Path, tmp_path: Path, change: Change, expected: str) -> None:
    architecture, adaptation = read_architecture(model), Adaptation.of(LoraSection(rank=2))
    shapes = factor_shapes(architecture, adaptation)
    tensors = {f"base_model.model.{name}": torch.ones(shape) for name, shape in shapes.items()}
    last = list(tensors)[-1]
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft_config(architecture, adaptation, "base")))
    save_file(tensors, tmp_path / PEFT_WEIGHTS)
    PeftAdapter(tmp_path, architecture, adaptation)
    save_file(tensors | {last: change(tensors[last])}, tmp_path / PEFT_WEIGHTS)
    with pytest.raises(ModelError, match=expected):
        PeftAdapter(tmp_path, architecture, adaptation)


# ---- writing


def test_a_model_that_is_not_finite_takes_no_good_ones_place(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    written = tmp_path / "written"
    write_checkpoint(written, Companions(model), only_finite(weights.items()), torch.float32)
    before = (written / "model.safetensors").read_bytes()
    weights[NAMES["norm"]][3] = NAN
    with pytest.raises(NotFiniteError, match=f"^{NAMES['norm']} holds 1 values that are not finite"):
        write_checkpoint(written, Companions(model), only_finite(weights.items()), torch.float32)
    assert (written / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["written"]
