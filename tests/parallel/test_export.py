"""Exports by all ranks that hold something: the files of one process, bit for bit, and nothing new where one fails."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hugging_face import make_model
from parallel.ranks import run_ranks
from rlhf_megatron.checkpoint import hugging_face
from rlhf_megatron.checkpoint.hugging_face import export_adapters, export_weights
from rlhf_megatron.models.architecture import Architecture, read_architecture
from rlhf_megatron.models.hf_export import Companions, export_form, write_checkpoint
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.lora import Adaptation, adapter_blocks, adapter_layout, whole_adapter_blocks
from rlhf_megatron.models.new_adapters import NewAdapters
from rlhf_megatron.models.peft_files import write_peft
from rlhf_megatron.models.weight_map import megatron_blocks, stays_float32, whole_blocks
from rlhf_megatron.models.weight_source import load_blocks
from rlhf_megatron.regather.plan import elements
from rlhf_megatron.regather.shard_specs import adapter_shards, parameter_shapes, trainer_shards
from rlhf_megatron.runtime.finite import NotFiniteError
from rlhf_megatron.topology.layout import Layout

SHARD_BYTES = 1 << 17
LAYOUTS: dict[str, dict[str, int]] = {
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "experts": {"data": 2, "expert": 2},
    "data": {"data": 2},
}
ADAPTATION = Adaptation(4, 2.0, ("q_proj", "down_proj"))


def held_by(architecture: Architecture, layout: Layout, model: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return this rank's parameters in a layout, as the files of ``model`` have them."""
    blocks = megatron_blocks(architecture, layout, dist.get_rank(), "local")
    kinds = {each.parameter: torch.float32 if stays_float32(each.tensor) else dtype for each in blocks}
    parameters = {name: torch.empty(shape, dtype=kinds[name]) for name, shape in parameter_shapes(blocks).items()}
    with CheckpointFiles(model, architecture) as files:
        load_blocks(blocks, parameters, files)
    return parameters


def export(model: str, folder: Path, layout: dict[str, int], dtype: torch.dtype, **changed: float) -> None:
    """Export ``model`` from the ranks of a layout; on this one a parameter is ``changed``, if it has that."""
    architecture, ranks = read_architecture(model), range(dist.get_world_size())
    parameters = held_by(architecture, Layout(**layout), model, dtype)
    for name in parameters.keys() & changed.keys():
        parameters[name].fill_(changed[name])
    sources = trainer_shards(architecture, Layout(**layout), ranks)
    export_weights(folder, Companions(Path(model)), architecture, sources, parameters, dtype, "cpu", SHARD_BYTES)


def export_factors(model: str, folder: Path, layout: dict[str, int]) -> None:
    """Export new adapters of ``model`` from the ranks of a layout."""
    architecture, of_ranks = read_architecture(model), range(dist.get_world_size())
    blocks = adapter_blocks(architecture, ADAPTATION, adapter_layout(Layout(**layout)), dist.get_rank())
    held = {name: torch.empty(shape) for name, shape in parameter_shapes(blocks).items()}
    load_blocks(blocks, held, NewAdapters(architecture, ADAPTATION, seed=1))
    sources = adapter_shards(architecture, ADAPTATION, Layout(**layout), of_ranks)
    export_adapters(folder, model, architecture, ADAPTATION, sources, held, "cpu")


def export_all(cases: list[list[Any]], home: str) -> list[str]:
    """Export each (model, layout's name, type); return this rank's errors of what must fail, in order."""
    hugging_face.PORTION_BYTES = 1 << 16
    torch.set_num_threads(1)
    for model, layout, dtype in cases:
        export(model, Path(home) / f"{Path(model).name} {layout}", LAYOUTS[layout], getattr(torch, dtype))
    model, folder = cases[0][0], Path(home) / "failing"
    export_factors(model, Path(home) / "adapter", LAYOUTS["tensor"])
    export(model, folder, LAYOUTS["tensor"], torch.float32)
    said = []
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for full in range(dist.get_world_size()):  # each rank in turn has no room
        if dist.get_rank() == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, usual[1]))
        try:
            export(model, folder, LAYOUTS["pipeline"], torch.float32)
        except OSError as error:
            said.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    try:
        export(model, folder, LAYOUTS["pipeline"], torch.float32, **{"decoder.final_layernorm.weight": torch.nan})
    except NotFiniteError as error:
        said.append(str(error))
    return said


def written_alone(model: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the model's weights in one process, tensor after tensor."""
    architecture = read_architecture(model)
    with CheckpointFiles(model, architecture) as files:
        ordered = sorted(whole_blocks(architecture), key=lambda block: stays_float32(block.tensor))
        kinds = ((each, torch.float32 if stays_float32(each.tensor) else dtype) for each in ordered)
        tensors = ((each.tensor, files.read(each.tensor, each.region).to(kind)) for each, kind in kinds)
        form = export_form(Companions(model), architecture)
        write_checkpoint(folder, Companions(model), form.stored(tensors), dtype, SHARD_BYTES)


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_ranks_write_what_one_process_writes(tmp_path: Path) -> None:
    models = {
        name: make_model(tmp_path / name, name, tied=name == "qwen3")
        for name in ("qwen3", "gpt_oss", "glm4_moe", "gemma3")
    }
    cases = [
        ("qwen3", "tensor", "float32"),
        ("qwen3", "pipeline", "bfloat16"),
        ("gpt_oss", "experts", "bfloat16"),  # whose files stack the matrices of experts
        ("glm4_moe", "experts", "bfloat16"),  # of which some tensors stay float32
        ("glm4_moe", "data", "float32"),
        ("gemma3", "tensor", "float32"),  # beside whose language model another tower is copied
    ]
    given = [[str(models[name]), layout, dtype] for name, layout, dtype in cases]
    first, second = run_ranks(export_all, 2, {"cases": given, "home": str(tmp_path)})
    for name, layout, dtype in cases:
        alone = tmp_path / f"{name} alone {dtype}"
        written_alone(models[name], alone, getattr(torch, dtype))
        assert len(list(alone.glob("*.safetensors"))) > 2
        assert content_of(tmp_path / f"{name} {layout}") == content_of(alone), (name, layout)
    architecture = read_architecture(models["qwen3"])
    new = NewAdapters(architecture, ADAPTATION, seed=1)
    factors = (
        (each.tensor, new.read(each.tensor, each.region)) for each in whole_adapter_blocks(architecture, ADAPTATION)
    )
    write_peft(tmp_path / "adapter alone", factors, architecture, ADAPTATION, str(models["qwen3"]))
    assert content_of(tmp_path / "adapter") == content_of(tmp_path / "adapter alone")

    assert first == second and len(first) == 3
    for rank, message in enumerate(first[:2]):
        assert message.startswith(f"rank {rank}: {tmp_path}/failing.partial/model-0000") and "\n" not in message
        assert "File too large" in message
    assert first[2].startswith("model.norm.weight holds 64 values that are not finite")
    assert content_of(tmp_path / "failing") == content_of(tmp_path / "qwen3 tensor")
    assert not list(tmp_path.glob("*.partial"))


class Dying(dict[str, torch.Tensor]):
    """Parameters that end their process as they are asked for in the third round of an export."""

    rounds = 0

    def values(self) -> Any:
        self.rounds += 1
        if self.rounds == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().values()


def die_in_an_export(model: str, folder: str) -> None:
    """Export ``model`` whole, and then again with a last rank that dies."""
    architecture, layout = read_architecture(model), LAYOUTS["pipeline"]
    hugging_face.PORTION_BYTES = 1 << 16
    export(model, Path(folder), layout, torch.float32)
    held: dict[str, torch.Tensor] = held_by(architecture, Layout(**layout), model, torch.float32)
    for parameter in held.values():
        parameter.zero_()
    if dist.get_rank():
        held = Dying(held)
    sources = trainer_shards(architecture, Layout(**layout), range(2))
    export_weights(
        Path(folder), Companions(Path(model)), architecture, sources, held, torch.float32, "cpu", SHARD_BYTES
    )


def test_a_rank_that_dies_leaves_the_earlier_export(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    with pytest.raises(RuntimeError, match="ended with status"):
        run_ranks(die_in_an_export, 2, {"model": str(model), "folder": str(tmp_path / "step-1")})
    written_alone(model, tmp_path / "alone", torch.float32)
    assert content_of(tmp_path / "step-1") == content_of(tmp_path / "alone")


def memory(field: str) -> int:
    """Return bytes of this process by a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def most_memory(small: str, model: str, folder: str) -> dict[str, int]:
    """Return bytes that an export took at most on this rank, beside its parameters; those that a writer may have."""
    export(small, Path(folder), {"tensor": 2}, torch.float32)  # what the first one takes for good
    architecture, layout = read_architecture(model), Layout(tensor=2)
    hugging_face.PORTION_BYTES, shard_bytes = 1 << 20, 8 << 20
    held = held_by(architecture, layout, model, torch.float32)
    sources = trainer_shards(architecture, layout, range(2))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the most so far is forgotten
    before = memory("VmRSS")
    export_weights(
        Path(folder), Companions(Path(model)), architecture, sources, held, torch.float32, "cpu", shard_bytes
    )
    # The largest tensor, of 2 MB, is a portion; each way there is a buffer of one; the rest is gloo's and Python's.
    return {"taken": memory("VmHWM") - before, "bound": shard_bytes + 3 * (2 << 20) + (8 << 20)}


def test_a_writer_has_one_file_in_memory(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", hidden_size=256, intermediate_size=2048, num_hidden_layers=16)
    whole = sum(elements(block.region) for block in whole_blocks(read_architecture(model))) * 4
    arguments = {
        "small": str(make_model(tmp_path / "small")),
        "model": str(model),
        "folder": str(tmp_path / "exported"),
    }
    for found in run_ranks(most_memory, 2, arguments):
        assert found["taken"] < found["bound"] < whole / 4, (found, whole)
    index = json.loads((tmp_path / "exported/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == whole
