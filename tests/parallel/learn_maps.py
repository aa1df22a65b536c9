"""Learns the maps of model folders and writes them, in a process of its own, to which vLLM's groups belong.

python learn_maps.py OUTPUT FOLDER... : OUTPUT/NAME-tT[-ep].json for each folder NAME and the layouts in LAYOUTS
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

if TYPE_CHECKING:
    from rlhf_megatron.models.rectangles import Block, Shapes
    from rlhf_megatron.rollout.copy_trace import LoadTrace
    from rlhf_megatron.rollout.vllm.weight_loading import Stored

# (tensor parallelism, expert parallel). With 4 ranks there are fewer key-value heads than ranks.
LAYOUTS = ((1, False), (2, False), (4, False), (2, True))


def map_file(folder: Path, name: str, tensor: int, expert_parallel: bool) -> Path:
    """Return where the map of a model and a layout is written."""
    return folder / f"{name}-t{tensor}{'-ep' if expert_parallel else ''}.json"


def learned_blocks(
    traces: Sequence[LoadTrace], tensor_shapes: Mapping[str, Sequence[int]], where: str
) -> list[list[Block]]:
    """Return the blocks of each rank of a replica, as a run's ranks learn them one by one; raises ModelError as they
    do."""
    from rlhf_megatron.models.learned_map import check_all_is_read, rank_blocks

    ranks = [rank_blocks(trace, tensor_shapes, where) for trace in traces]
    check_all_is_read(ranks, tensor_shapes, where)
    return ranks


def main(output: Path, folders: list[Path]) -> None:
    from rlhf_megatron.models.architecture import ModelError, read_architecture, wrapped_language
    from rlhf_megatron.models.map_files import write_map
    from rlhf_megatron.models.stacked import stored_tensors
    from rlhf_megatron.models.weight_map import stacked_tensors, tensor_shapes
    from rlhf_megatron.rollout.vllm.weight_loading import trace_rank

    for folder in folders:
        architecture = read_architecture(folder)
        shapes = tensor_shapes(architecture)
        stored = functools.partial(stored_tensors, stacked=stacked_tensors(architecture))
        loaded: dict[str, list[str]] = {"compared": [], "different": []}
        for tensor, expert_parallel in LAYOUTS:
            if expert_parallel and architecture.experts is None:
                continue
            traces = [
                trace_rank(
                    folder,
                    shapes,
                    tensor,
                    rank,
                    expert_parallel,
                    "float32",
                    stored=stored,
                    language=wrapped_language(folder),
                )
                for rank in range(tensor)
            ]
            target = map_file(output, folder.name, tensor, expert_parallel)
            try:
                learned = learned_blocks(traces, shapes, folder.name)
            except ModelError as error:
                target.with_suffix(".refused").write_text(str(error))
                continue
            write_map(target, learned, {"model": folder.name})
            if tensor == 2:
                loaded["compared"].append(target.name)
                loaded["different"] += differences(folder, shapes, stored, learned[1], tensor, 1, expert_parallel)
        (output / f"{folder.name}.loaded").write_text(json.dumps(loaded))


def differences(
    folder: Path,
    shapes: Shapes,
    stored: Stored,
    blocks: Sequence[Block],
    tensor: int,
    rank: int,
    expert_parallel: bool,
) -> list[str]:
    """Return the parameters in which vLLM's own load of random tensors is not what ``blocks`` say; padding may be 0."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from rlhf_megatron.compat.vllm.internals import loaded_tensors
    from rlhf_megatron.compat.vllm.load_tracing import as_rank
    from rlhf_megatron.models.architecture import wrapped_language
    from rlhf_megatron.models.weight_source import window
    from rlhf_megatron.rollout.vllm.model_config import config_arguments

    config = EngineArgs(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        load_format="dummy",
        **config_arguments(folder, wrapped_language(folder)),
    ).create_engine_config()
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    with as_rank(config, tensor, rank, expert_parallel), torch.no_grad():
        model = initialize_model(config)
        parameters = {name: parameter.data for name, parameter in loaded_tensors(model)}
        for parameter in parameters.values():
            parameter.fill_(torch.nan)
        model.load_weights(stored(tensors.items()))
    expected = {name: torch.full_like(parameter, torch.nan) for name, parameter in parameters.items()}
    for block in blocks:
        source = tensors[block.tensor][tuple(slice(*span) for span in block.region)]
        window(expected[block.parameter], block.offset, block.region).copy_(source)
    return [
        name
        for name, parameter in parameters.items()
        if not torch.equal(parameter, torch.where(expected[name].isnan(), 0.0, expected[name]))
    ]


if __name__ == "__main__":
    prepare_environment()
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
