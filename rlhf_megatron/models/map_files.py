"""Learned weight maps of vLLM, kept as JSON by model, layout and vLLM version, so that a dry run needs no vLLM."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.models.architecture import ModelError, read_config
from rlhf_megatron.models.weight_map import Block
from rlhf_megatron.untrusted import read_json

FOLDER = ".weight_maps"  # within recipe.run_root, beside the runs
FORMAT = 1
_LAYER = re.compile(r"\.layers\.(\d+)\.")
# A map of all ranks of the largest models: 3,600 blocks of 16 ranks.
_MOST_BYTES = 256 * 2**20


def remembered_rollout_blocks(
    folder: str | Path, tensor: int, expert_parallel: bool, run_root: str | Path
) -> list[list[Block]] | None:
    """Return what an earlier run under ``run_root`` has learned of the model in ``folder``, None if none has."""
    latest = remembered_file(folder, tensor, expert_parallel, run_root)
    return None if latest is None else read_map(latest)


def remembered_file(folder: str | Path, tensor: int, expert_parallel: bool, run_root: str | Path) -> Path | None:
    """Return the file that has it, None if none has."""
    return _latest(Path(run_root) / FOLDER, read_config(folder), tensor, expert_parallel)


def map_file(folder: Path, config: Mapping[str, Any], tensor: int, expert_parallel: bool, vllm_version: str) -> Path:
    """Return where a map is kept under ``folder``, by all that it depends on."""
    return folder / f"{_digest(config, tensor, expert_parallel)}-{vllm_version}.json"


def stored_map(folder: Path, config: Mapping[str, Any], tensor: int, expert_parallel: bool) -> list[list[Block]] | None:
    """Return the latest map of whatever vLLM version; None: none was learned. Raises ModelError where it is damaged."""
    latest = _latest(folder, config, tensor, expert_parallel)
    return None if latest is None else read_map(latest)


def _latest(folder: Path, config: Mapping[str, Any], tensor: int, expert_parallel: bool) -> Path | None:
    files = folder.glob(f"{_digest(config, tensor, expert_parallel)}-*.json")
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=None)


def _digest(config: Mapping[str, Any], tensor: int, expert_parallel: bool) -> str:
    identity = [FORMAT, dict(config), tensor, expert_parallel]
    return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()


def write_map(path: Path, blocks_of_ranks: Sequence[Sequence[Block]], about: Mapping[str, Any]) -> None:
    """Write the blocks of a replica's ranks as JSON, layers that are alike once."""
    content = {"format": FORMAT, "about": dict(about), "ranks": [_packed(blocks) for blocks in blocks_of_ranks]}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
    partial.replace(path)


def read_map(path: Path) -> list[list[Block]]:
    """Return what ``write_map`` wrote; raises ModelError where the file is missing or damaged."""
    content = read_json(path, ModelError, _MOST_BYTES)
    try:
        if content["format"] != FORMAT:
            raise ModelError(f"{path}: format {content['format']}; this version reads {FORMAT}; learn the map again")
        return [_unpacked(rank) for rank in content["ranks"]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: is no weight map; remove it and learn the map again") from error


def _packed(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return blocks as {"kinds": blocks of each kind of layer, "layers": [number, kind], "rest": other blocks}."""
    layers: dict[int, list[Any]] = {}
    rest: list[Any] = []
    for block in blocks:
        match = _LAYER.search(block.tensor)
        packed = [_LAYER.sub(".layers.*.", block.tensor), block.region, _LAYER.sub(".layers.*.", block.parameter)]
        if match and _LAYER.search(block.parameter):
            layers.setdefault(int(match.group(1)), []).append([*packed, block.offset])
        else:
            rest.append(block)
    kinds: dict[str, int] = {}
    for alike in layers.values():
        kinds.setdefault(json.dumps(alike), len(kinds))
    numbered = [(layer, kinds[json.dumps(alike)]) for layer, alike in sorted(layers.items())]
    return {"kinds": [json.loads(kind) for kind in kinds], "layers": numbered, "rest": rest}


def _unpacked(rank: Mapping[str, Any]) -> list[Block]:
    named = [(block, None) for block in rank["rest"]]
    named += [(block, layer) for layer, kind in rank["layers"] for block in rank["kinds"][kind]]
    return [_block_of(block, layer) for block, layer in named]


def _block_of(packed: Sequence[Any], layer: int | None) -> Block:
    tensor, region, parameter, offset = packed
    names = [name if layer is None else name.replace(".layers.*.", f".layers.{layer}.") for name in (tensor, parameter)]
    spans = tuple((int(start), int(stop)) for start, stop in region)
    return Block(names[0], spans, names[1], tuple(map(int, offset)))
