"""A family is known by its file and its line in the registry, and nothing else asks which one a model is of."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import rlhf_megatron
from hugging_face import CONFIGS
from rlhf_megatron.models.families import FAMILIES, MODEL_TYPES

# Unknown to transformers, which reads them as another; compared in test_published_configs.py.
ELSEWHERE = {"kimi_k2": "deepseek_v3"}
LIBRARY = Path(rlhf_megatron.__file__).parent
REGISTRY = LIBRARY / "models" / "families"


def test_every_family_is_compared_with_transformers() -> None:
    assert {config.model_type for config in CONFIGS.values()} == set(MODEL_TYPES) - ELSEWHERE.keys()
    classes = {config.model_type: config.__name__ for config in CONFIGS.values()}
    for name in MODEL_TYPES:
        family = FAMILIES[name]
        assert family.classes + "Config" == classes[ELSEWHERE.get(name, name)]


def test_nothing_but_the_registry_names_a_family() -> None:
    quoted = re.compile(rf"""["']({"|".join(FAMILIES)})["']""")
    for path in sorted(LIBRARY.rglob("*.py")):
        if path.is_relative_to(REGISTRY):
            continue
        assert not quoted.search(path.read_text()), path


def test_a_description_needs_no_torch() -> None:
    code = "import sys, rlhf_megatron.models.weight_map; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
