"""Reading a model once per node: the parameters of mapped files, bit for bit, and no byte of the files twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from hugging_face import make_model
from parallel.ranks import run_ranks
from rlhf_megatron.models.architecture import ModelError, read_architecture
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.node_copy import Extent, share_of
from rlhf_megatron.models.weight_map import Block, megatron_blocks
from rlhf_megatron.models.weight_source import load_blocks
from rlhf_megatron.regather.shard_specs import parameter_shapes
from rlhf_megatron.topology.communicators import alone, own_node
from rlhf_megatron.topology.layout import Layout
from unit.test_block_scales import quantized_model
from unit.test_stacked_tensors import packed

CASES: dict[str, tuple[str, dict[str, int]]] = {
    "tensor": ("qwen3", {"tensor": 2}),
    "pipeline": ("qwen3", {"pipeline": 2}),
    "data": ("qwen3", {"data": 2}),
    "stacked": ("gpt_oss", {"data": 2, "expert": 2}),  # whose files stack the matrices of experts
    "packed": ("mxfp4", {"data": 2, "expert": 2}),
    "quantized": ("fp8", {"tensor": 2}),
}


def filled(files: CheckpointFiles, blocks: list[Block]) -> dict[str, torch.Tensor]:
    parameters = {name: torch.empty(shape) for name, shape in parameter_shapes(blocks).items()}
    load_blocks(blocks, parameters, files)
    return parameters


def read_bytes_by_calls() -> int:
    """Return bytes that this process has read by calls so far, of files and pipes; what is mapped is not among them."""
    return int(psutil.Process().io_counters().read_chars)


def read_ways(models: dict[str, str]) -> dict[str, Any]:
    """Return of each case what this rank read, and what is said of a file that ends early."""
    found: dict[str, Any] = {}
    for name, (family, degrees) in CASES.items():
        folder = Path(models[family])
        architecture = read_architecture(folder)
        blocks = megatron_blocks(architecture, Layout(**degrees), dist.get_rank(), "local")
        tensors = {block.tensor for block in blocks}
        with CheckpointFiles(folder, architecture) as files:
            mapped = filled(files, blocks)
        for way, group in (("node", own_node()), ("alone", alone())):
            with CheckpointFiles(folder, architecture) as files:
                before = read_bytes_by_calls()
                files.read_once(tensors, group)
                assert files.node_copy is not None
                by_calls = read_bytes_by_calls() - before
                copied = filled(files, blocks)
                found[f"{name} {way}"] = {
                    "equal": all(torch.equal(copied[each], mapped[each]) for each in mapped),
                    "own": files.node_copy.bytes_read,
                    "by_calls": by_calls,
                }
    with CheckpointFiles(models["cut"], read_architecture(models["cut"])) as files:
        dist.barrier()
        if dist.get_rank() == 0:
            weights = Path(models["cut"]) / "model.safetensors"
            with weights.open("r+b") as file:
                file.truncate(weights.stat().st_size - 64)
        dist.barrier()
        with pytest.raises(ModelError) as refused:
            files.read_once(files._file_of, own_node())
        found["cut"] = str(refused.value)
    return found


def test_ranks_of_a_node_read_no_byte_twice(tmp_path: Path) -> None:
    models = {family: str(make_model(tmp_path / family, family)) for family in ("qwen3", "gpt_oss")}
    models["mxfp4"] = str(packed(tmp_path / "gpt_oss", tmp_path / "mxfp4"))
    models["fp8"] = str(quantized_model(tmp_path / "fp8"))
    models["cut"] = str(make_model(tmp_path / "cut", seed=1))
    ranks = run_ranks(read_ways, 2, {"models": models})
    for name, (family, _) in CASES.items():
        size = (Path(models[family]) / "model.safetensors").stat().st_size
        together = [found[f"{name} node"] for found in ranks]
        assert all(each["equal"] for each in together), name
        assert sum(each["own"] for each in together) == size, name  # of all that the file has, each byte once
        assert abs(together[0]["own"] - together[1]["own"]) <= 1
        # The system's count has a few more: the header, by which the first rank finds the tensors, and /proc.
        assert size <= sum(each["by_calls"] for each in together) < 1.2 * size, name
    for found in ranks:  # as of a node of one rank, which reads what that holds
        size = (Path(models["qwen3"]) / "model.safetensors").stat().st_size
        assert found["pipeline alone"]["equal"] and found["pipeline alone"]["own"] < 0.7 * size
        assert found["tensor alone"]["own"] == size
        assert (
            found["cut"]
            == ranks[0]["cut"]
            == (f"{models['cut']}/model.safetensors: ends within a tensor; download the model again")
        )


def test_shares_are_parts_without_gaps() -> None:
    extents = [Extent("a", 0, 10), Extent("a", 20, 27), Extent("b", 5, 9)]
    for count in (1, 2, 3, 5, 30):
        shares = [list(share_of(extents, position, count)) for position in range(count)]
        covered = [(path, byte) for share in shares for path, start, stop in share for byte in range(start, stop)]
        assert covered == [(path, byte) for path, start, stop in extents for byte in range(start, stop)]
        sizes = [sum(stop - start for _, start, stop in share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
