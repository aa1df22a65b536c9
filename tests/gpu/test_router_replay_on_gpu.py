"""Router replay on a GPU in bfloat16, from an engine with CUDA graphs and from one without."""

from __future__ import annotations

from pathlib import Path

import pytest

from hugging_face import make_model
from parallel.ranks import run_ranks
from parallel.replay_ranks import mismatch


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "CUDA graphs"])
def test_trainer_and_rollout_agree_by_replay(eager: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 8}
    make_model(tmp_path / "model", "qwen3_moe", tied=False, num_experts=16, num_experts_per_tok=4, **sizes)
    rollout = {"kv_cache_gb": 1.0, "enforce_eager": eager}
    arguments = {"model": str(tmp_path / "model"), "dtype": "bfloat16", "layout": {}, "rollout": rollout}
    of_replay = run_ranks(mismatch, 1, arguments)[0]
    for name in ("train/mismatch_kl", "train/rollout_logprob_abs_diff", "train/rollout_logprob_abs_diff_max"):
        off, replayed = (of_replay[which][name] for which in ("off", "rollout"))
        print(f"{name}: {off:.2e} without replay, {replayed:.2e} with it")
    off, replayed = (of_replay[which]["train/mismatch_kl"] for which in ("off", "rollout"))
    assert 0 <= replayed < off / 2
