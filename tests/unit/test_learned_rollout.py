"""What was learned of vLLM's loader: kept for dry runs, and held against the engine that is there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.learned_map import check_all_is_written
from rlhf_megatron.models.map_files import map_file, stored_map, write_map
from rlhf_megatron.models.weight_map import rollout_blocks
from rlhf_megatron.regather.shard_specs import rollout_shards
from shards import architecture

CONFIG: dict[str, Any] = {"model_type": "any", "hidden_size": 16}


def test_a_map_is_kept_by_config_layout_and_version_and_the_latest_counts(tmp_path: Path) -> None:
    a = architecture()
    one, other = rollout_blocks(a, 2, 0), rollout_blocks(a, 2, 1)
    assert stored_map(tmp_path / "nowhere", CONFIG, 2, False) is None
    files = [map_file(tmp_path, CONFIG, 2, False, version) for version in ("0.25.1", "0.32.0")]
    for moment, (file, blocks) in enumerate(zip(files, ([one, one], [one, other]), strict=True)):
        write_map(file, blocks, {"model": "here"})
        os.utime(file, (moment, moment))
    found = stored_map(tmp_path, CONFIG, 2, False)
    assert found is not None and [sorted(rank) for rank in found] == [sorted(one), sorted(other)]
    for config, tensor, expert_parallel in (
        (CONFIG | {"hidden_size": 8}, 2, False),
        (CONFIG, 1, False),
        (CONFIG, 2, True),
    ):
        assert stored_map(tmp_path, config, tensor, expert_parallel) is None
    files[1].write_text(json.dumps({"format": 1}))
    os.utime(files[1], (9, 9))
    with pytest.raises(ModelError, match="is no weight map; remove it and learn the map again$"):
        stored_map(tmp_path, CONFIG, 2, False)


def test_shards_of_a_learned_map_are_those_of_the_table() -> None:
    a = architecture(experts=4)
    learned = [rollout_blocks(a, 2, rank) for rank in (0, 1)]
    table, read = rollout_shards(a, 2, range(4)), rollout_shards(a, 2, range(4), learned=learned)
    assert read.shard_of == table.shard_of
    for shard in (0, 1):
        assert read.blocks_of(shard) == table.blocks_of(shard)


def test_an_engine_with_a_parameter_that_nothing_fills_is_refused() -> None:
    blocks = rollout_blocks(architecture(), 1, 0)
    names = {block.parameter for block in blocks}
    check_all_is_written(blocks, names, (), "here")
    check_all_is_written(blocks, names | {"model.made"}, ["model.made"], "here")
    for odd in (names | {"model.more"}, names - {"model.norm.weight"}):
        with pytest.raises(
            ModelError, match="^here: the learned weight map and vLLM's engine disagree on its parameter"
        ):
            check_all_is_written(blocks, odd, (), "here")
