"""YaRN's factor of queries and keys, however a config.json writes it: trainer, vLLM and an export have the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hugging_face import SPECIAL, make_model
from rlhf_megatron.models.architecture import config_notes, read_architecture
from rlhf_megatron.models.hf_export import Companions, export_form, write_checkpoint
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.weight_map import tensor_shapes
from rlhf_megatron.rollout.vllm.model_config import config_arguments

YARN: dict[str, Any] = SPECIAL["qwen2_yarn"]["rope_parameters"]
OF_LENGTH = 0.1 * math.log(YARN["factor"]) + 1  # what vLLM before 0.30 multiplies by attn_factor
FACTORS = [
    ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ({"mscale": 1.0, "mscale_all_dim": 0.8}, OF_LENGTH / (0.08 * math.log(4) + 1)),
    ({"attention_factor": 0.7}, 0.7),
    ({"attention_factor": None}, OF_LENGTH),
    ({"attn_factor": 0.7}, 0.7 * OF_LENGTH),
    ({"attn_factor": 0.8782488562869419}, 1.0),
    ({"attn_factor": 0.8782488562869419, "attention_factor": 1.0}, 1.0),
    ({"attn_factor": 0.7, "attention_factor": 0.797041}, 0.7 * OF_LENGTH),  # rounded, as a run says it
    ({"attn_factor": None}, OF_LENGTH),
]


def write_yarn(folder: Path, written: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model in ``folder`` that has ``written`` among its YaRN parameters."""
    file = make_model(folder, "qwen2_yarn") / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    config["rope_parameters"] |= written
    file.write_text(json.dumps(config))
    return config


@pytest.mark.parametrize(("written", "factor"), FACTORS)
def test_every_vllm_and_transformers_are_given_the_trainers_factor(
    written: dict[str, Any], factor: float, tmp_path: Path
) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    write_yarn(tmp_path / "model", written)
    assert read_architecture(tmp_path / "model").rope.attention_factor == pytest.approx(factor)
    plain = AutoConfig.from_pretrained(tmp_path / "model")
    if "attn_factor" not in written:
        assert ROPE_INIT_FUNCTIONS["yarn"](plain, "cpu")[1] == pytest.approx(factor)
    given = config_arguments(tmp_path / "model")["hf_overrides"](plain)
    assert given.rope_parameters["attn_factor"] * OF_LENGTH == pytest.approx(factor)
    assert ROPE_INIT_FUNCTIONS["yarn"](given, "cpu")[1] == pytest.approx(factor)
    with set_current_vllm_config(VllmConfig()):
        assert get_rope(32, 256, rope_parameters=given.rope_parameters).mscale == pytest.approx(factor)


def test_vllm_reads_a_plain_config_itself(tmp_path: Path) -> None:
    assert config_arguments(make_model(tmp_path / "model", "qwen2_yarn")) == {}


def test_an_export_keeps_attn_factor(tmp_path: Path) -> None:
    config = write_yarn(tmp_path / "model", {"attn_factor": 0.7})
    architecture, companions = read_architecture(tmp_path / "model"), Companions(tmp_path / "model")
    with CheckpointFiles(tmp_path / "model", architecture) as files:
        stored = export_form(companions, architecture).stored(
            (name, files.read(name, ())) for name in tensor_shapes(architecture)
        )
        write_checkpoint(tmp_path / "exported", companions, stored, torch.float32)
    exported = json.loads((tmp_path / "exported/config.json").read_text())
    assert exported["rope_parameters"] == config["rope_parameters"]
    assert read_architecture(tmp_path / "exported") == architecture


def test_a_run_says_once_what_others_make_of_attn_factor() -> None:
    config = {"model_type": "qwen2", "rope_scaling": YARN | {"attn_factor": 0.7}}
    said = (
        "attn_factor scales queries and keys by 0.797041, as in vLLM before 0.30; transformers and newer vLLM ignore "
        "it and take 1.13863, unless config.json also has attention_factor: 0.797041"
    )
    assert config_notes(config) == (said,)
    wrapped = config_notes({"model_type": "mistral3", "text_config": config})
    assert len(wrapped) == 2 and wrapped[1] == said
    by_type = {"full_attention": config["rope_scaling"], "sliding_attention": {"rope_type": "default"}}
    assert config_notes({"model_type": "olmo3", "rope_parameters": by_type}) == (said,)
    for written in (
        {"attn_factor": 0.7, "attention_factor": 0.797041},
        {"attn_factor": 1.0},
        {"attn_factor": None},
        {},
    ):
        assert config_notes({"model_type": "qwen2", "rope_scaling": YARN | written}) == ()
