"""Learns the maps of model folders and writes them, in a process of its own, to which vLLM's groups belong.

python learn_maps.py OUTPUT FOLDER... : OUTPUT/NAME-tT[-ep].json for each folder NAME and the layouts in LAYOUTS
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

# (tensor parallelism, expert parallel). With 4 ranks there are fewer key-value heads than ranks.
LAYOUTS = ((1, False), (2, False), (4, False), (2, True))


def map_file(folder: Path, name: str, tensor: int, expert_parallel: bool) -> Path:
    """Where the map of a model and a layout is written."""
    return folder / f"{name}-t{tensor}{'-ep' if expert_parallel else ''}.json"


def main(output: Path, folders: list[Path]) -> None:
    from rlhf_megatron.models.architecture import ModelError, read_architecture
    from rlhf_megatron.models.learned_map import learned_blocks, write_map
    from rlhf_megatron.models.weight_map import tensor_shapes
    from rlhf_megatron.rollout.vllm.weight_loading import trace_rank

    for folder in folders:
        architecture = read_architecture(folder)
        shapes = tensor_shapes(architecture)
        for tensor, expert_parallel in LAYOUTS:
            if expert_parallel and architecture.experts is None:
                continue
            traces = [trace_rank(folder, shapes, tensor, rank, expert_parallel, "float32") for rank in range(tensor)]
            target = map_file(output, folder.name, tensor, expert_parallel)
            try:
                write_map(target, learned_blocks(traces, shapes, folder.name), {"model": folder.name})
            except ModelError as error:
                target.with_suffix(".refused").write_text(str(error))


if __name__ == "__main__":
    prepare_environment()
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
