"""Activations of one layer of real models, computed by hand: numbers of two bytes for a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_megatron.models.architecture import LayerKind, read_architecture
from rlhf_megatron.planning.activation_memory import layer_activations
from rlhf_megatron.recipe import ActorSection, OptimizerSection
from rlhf_megatron.topology.layout import Layout

MODELS = Path(__file__).resolve().parents[2] / "recipes" / "models"
SECTION = ActorSection(tokens_per_gpu=8192, optimizer=OptimizerSection(learning_rate=1e-6))
EIGHT, ONE = Layout(8, expert=8, expert_tensor=1), Layout()
EXPERTS = LayerKind("full", "experts")
# Norms; queries, keys, values and outputs; gate, up, product, input and output of each expert that a token reaches.
GLM = 4 * 4096 + (2 * 96 + 2 * 8) * 128 + 3 * 1408 + 8 * (3 * 1408 + 2 * 4096)
# Gate and up also as they were before they were clamped.
GPT_OSS = 4 * 2880 + (2 * 64 + 2 * 8) * 64 + 4 * (5 * 2880 + 2 * 2880)
DEEPSEEK_ATTENTION = 4 * 7168 + 2 * (1536 + 512) + 2 * 128 * (192 + 128)
DEEPSEEK = DEEPSEEK_ATTENTION + 3 * 2048 + 8 * (3 * 2048 + 2 * 7168)
# Beside these two norms of heads, and gates.
NEXT_EXPERTS = 4 * 2048 + 3 * 512 + 10 * (3 * 512 + 2 * 2048)
NEXT = NEXT_EXPERTS + (2 * 16 + 2 * 2 + 16 + 2 + 2 * 16) * 256
# 4 taps over 8192 channels, and 11 times 4096 for norm and gate; queries and keys of 16 heads in float32, again for
# each of 32 heads, and decays and strengths; the rule in float32: 11 vectors of 128, 5 rows of a chunk of 64, and a
# 64th of a state.
NEXT_DELTA = (
    NEXT_EXPERTS + 6 * 8192 + 11 * 4096 + 2 * 2 * 2048 + 32 * (2 * 128 + 2 * 2)
    + 2 * 32 * (11 * 128 + 5 * 64 + 128 * 128 / 64)
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "kind", "layout", "numbers"),
    [
        ("glm-4.5-air", EXPERTS, ONE, GLM),
        ("gpt-oss-20b", EXPERTS, ONE, GPT_OSS),
        ("gpt-oss-20b", LayerKind("window", "experts"), EIGHT, GPT_OSS / 8),
        ("deepseek-v3", EXPERTS, EIGHT, DEEPSEEK / 8),
        ("deepseek-v3", LayerKind("full", "dense"), EIGHT, (DEEPSEEK_ATTENTION + 3 * 18432) / 8),
        ("qwen3-next-80b-a3b", EXPERTS, ONE, NEXT),
        ("qwen3-next-80b-a3b", LayerKind("delta", "experts"), ONE, NEXT_DELTA),
    ],
)
def test_a_layer_by_hand(model: str, kind: LayerKind, layout: Layout, numbers: float) -> None:
    found = layer_activations(SECTION, read_architecture(MODELS / model), kind, layout, 2, 8192)
    assert found == pytest.approx(2 * numbers)


def test_sinks_in_float32_keep_every_product() -> None:
    """Transformer Engine's layers or not: all products of 64 heads with the keys of the row."""
    architecture = read_architecture(MODELS / "gpt-oss-20b")
    short, long = (layer_activations(SECTION, architecture, EXPERTS, ONE, 4, longest) for longest in (0, 8192))
    assert long - short == 4 * 64 * 8192
