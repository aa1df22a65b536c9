"""What the benchmark of memory reckons beside what it measures, with each of its switches."""

from __future__ import annotations

import argparse
from pathlib import Path

import memory as bench
import pytest

MODEL = Path(__file__).resolve().parents[2] / "recipes" / "models" / "qwen2.5-7b"


def reckoned(switch: str, tokens: int = 1024) -> dict[str, float]:
    options = argparse.Namespace(model=MODEL, tokens_per_gpu=tokens, length=512)
    return bench.reckoned(options, bench.SWITCHES[switch])


@pytest.mark.parametrize("switch", bench.SWITCHES)
def test_a_switch_saves_where_it_says(switch: str) -> None:
    none, found = reckoned("none"), reckoned(switch)
    saves = {key: none[key] - value for key, value in found.items()}
    assert all(saved >= 0 for saved in saves.values())
    assert (saves["reckoned_rollout_gb"] > 10) == ("offload" in switch or "streamed" in switch)
    assert (saves["reckoned_update_gb"] > 1) == any(part in switch for part in ("layers", "full", "streamed"))
    if switch == "offload all, recompute full":
        assert found["reckoned_rollout_gb"] == 0


def test_activations_grow_with_a_micro_batch() -> None:
    # Of 7.6 billion parameters 18 bytes each: weights and gradients, moments and master weights in float32.
    held = 7_615_616_512 * 18 / bench.GB
    one, four = (reckoned("none", tokens)["reckoned_update_gb"] for tokens in (1024, 4096))
    assert held < one < four < held + 30
    assert (four - held) / (one - held) == pytest.approx(4, rel=0.3)
