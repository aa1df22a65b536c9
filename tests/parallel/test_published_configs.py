"""Published configs: each is accepted, and a small model of its flags has transformers' logprobs on one rank."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hugging_face import auto_class, fill, load_model, name_as_published, random_rows, row_logprobs
from parallel.parity import Launches, case, launches, selected_names
from published_configs import PUBLISHED, VOCABULARY, small
from rlhf_megatron.models.architecture import ModelError, parse_architecture

REFUSED = {
    "Qwen3-32B-FP8-Static-PerTensor": "quantization_config is",
    "gemma-4-E2B-it": "num_kv_shared_layers is 20, which is not supported; supported: 0$",
}
ACCEPTED = sorted(PUBLISHED.keys() - REFUSED.keys())
IN_TESTS = ("Qwen3-0.6B", "DeepSeek-R1", "DeepSeek-R1-0528-Qwen3-8B")  # of ``make test``
AS = {"kimi_k2": "deepseek_v3"}  # what transformers reads a model as that it does not know
ROWS = random_rows(7, VOCABULARY)


def make_small(folder: Path, name: str) -> dict[str, Any]:
    """Save a small model with the flags of a published one, whose config.json is as its makers write it."""
    config = small(PUBLISHED[name])
    read = AutoConfig.for_model(**as_transformers(config))
    model = auto_class(read).from_config(read, dtype=torch.float32)
    fill(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    if config["model_type"] == "kimi_k25":
        name_as_published(folder)
    return case(folder, {}, list(ROWS), steps=1)


def as_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose model type transformers knows, with the factor that attn_factor has in vLLM 0.25.1."""
    theirs = copy.deepcopy(config) | {"model_type": AS.get(config["model_type"], config["model_type"])}
    yarn = theirs.get("rope_scaling") or {}
    if "attn_factor" in yarn:
        yarn["attention_factor"] = yarn.pop("attn_factor") * (0.1 * math.log(yarn["factor"]) + 1.0)
    return theirs


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, home: Path) -> Launches:
    def told(name: str) -> Mapping[str, Any]:
        return make_small(home / name, name)

    return launches(dict.fromkeys(ACCEPTED, 1), selected_names(request), told)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_TESTS else pytest.mark.grid) for name in ACCEPTED]
)
def test_a_small_model_has_the_logprobs_of_transformers(
    name: str, home: Path, results: Launches, record_property: Callable[[str, Any], None]
) -> None:
    found = torch.tensor(results[name][0]["logprobs"])
    config = home / name / "config.json"
    config.write_text(json.dumps(as_transformers(json.loads(config.read_text()))))
    model = load_model(home / name)
    for part, module in model.named_modules():
        if part.endswith("_a_layernorm"):  # the norms of latents, whose epsilon here is vLLM's
            module.variance_epsilon = model.config.get_text_config().rms_norm_eps
    with torch.no_grad():
        expected = torch.cat([row_logprobs(model, p, r) for p, r in zip(*ROWS, strict=True)])
    difference = float((found - expected).abs().max())
    record_property(
        "measured",
        {
            "compared": "published",
            "name": name,
            "model_type": PUBLISHED[name]["model_type"],
            "logprobs": difference,
        },
    )
    # With delta nets transformers' own logprobs in float32 are up to 1.3e-5 from those in float64, ours 1.4e-5.
    assert difference < (2e-5 if PUBLISHED[name]["model_type"].startswith(("qwen3_5", "qwen3_next")) else 1e-5)


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_config_is_accepted_or_refused_in_one_line(model: str) -> None:
    if model not in REFUSED:
        parse_architecture(PUBLISHED[model], "here")
        return
    with pytest.raises(ModelError, match=rf"^here/config.json(?: \(text_config\))?: {REFUSED[model]}"):
        parse_architecture(PUBLISHED[model], "here")
