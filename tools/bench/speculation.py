"""Generation with drafts of a known acceptance, beside generation without: what speculative decoding can gain and lose.

    python tools/bench/speculation.py [--model recipes/models/qwen2.5-7b] [--output docs/results/speculation.json]
        [--method eagle3 --draft-model FOLDER]

Each setting has an engine in a process of its own and generates the same requests: random weights and prompts, 32 x 8
responses of lognormal lengths, those of ``step_recipe.yaml``. ``synthetic_acceptance_length`` gives that many tokens a
step and drafted sequence, as if drafts were right: 1 is the cost of drafts that are all wrong. Drafts are made while at
most ``max_running`` sequences run; those of a model, here of random weights too, cost what the model does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from launching import main_or_rank, measured_on_ranks
from reports import spread, write_report
from rollout import model_or_toy

WARM_UPS, SAMPLED = 1, (2, 500)
# prompts, responses to each, tokens of a prompt, mean and longest response
SIZES = {"toy": (8, 4, 32, 48, 96), "gpu": (32, 8, 256, 1024, 4096)}
# acceptance length, draft tokens, sequences up to which there are drafts; none: no speculation
SETTINGS: list[tuple[float, int, int] | None] = [
    None, (2.0, 1, 2**16), (2.0, 3, 2**16), (1.0, 3, 2**16), (1.0, 3, 32), (2.0, 3, 32)
]  # fmt: skip


def main() -> int:
    """Measure one setting after the other; return 1 where one failed."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder with a config.json; default: Qwen2.5-7B, on CPUs a toy")
    parser.add_argument("--repeats", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--settings", type=int, nargs="+", help="numbers of SETTINGS; default: all")
    parser.add_argument("--method", choices=("ngram", "suffix", "eagle3", "mtp"), default="suffix", help="what drafts")
    parser.add_argument("--draft-model", type=Path, help="for eagle3: folder with the head's config.json")
    parser.add_argument("--output", type=Path, default=Path("docs/results/speculation.json"))
    options = parser.parse_args()
    rows, failed = [], False
    with model_or_toy(options.model) as model:
        for number in options.settings or range(len(SETTINGS)):
            size = "gpu" if on_gpu else "toy"
            given = {
                "model": str(model), "number": number, "repeats": options.repeats, "size": size,
                "method": options.method, "draft_model": options.draft_model and str(options.draft_model),
            }  # fmt: skip
            reason, row = measured_on_ranks(1, Path(__file__), given, 600.0)
            failed |= bool(reason)
            rows.append({"failed": reason} if reason else row)
            print(json.dumps(rows[-1]), flush=True)
            write_report(options.output, {"model": model.name, "method": options.method, "rows": with_ratios(rows)})
    return int(failed)


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, each with its time over that without drafts, where that was measured."""
    plain = [row["seconds"]["median"] for row in rows if "seconds" in row and row["acceptance_length"] is None]
    return [
        {**row, "of_plain": row["seconds"]["median"] / median(plain)} if plain and "seconds" in row else row
        for row in rows
    ]


def measure(model: str, number: int, repeats: int, size: str, method: Any, draft_model: str | None) -> dict[str, Any]:
    """Return the seconds of one setting's generations, with drafts by ``method``."""
    from rlhf_megatron.recipe import RolloutSection
    from rlhf_megatron.recipe.rollout import DrawnLengthsSection
    from rlhf_megatron.recipe.speculative import SpeculativeSection
    from rlhf_megatron.rollout.engine import Request, Sampling
    from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine

    setting, (prompts, responses, length, mean, longest) = SETTINGS[number], SIZES[size]
    accepted, tokens, running = setting or (None, 0, 0)
    drafts = setting and SpeculativeSection(
        method=method, synthetic_acceptance_length=accepted, num_speculative_tokens=tokens, max_running=running
    )
    section = RolloutSection(
        max_response_length=longest, max_num_seqs=512, gpu_memory_utilization=0.8, sleep=False, speculative=drafts
    )
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    engine = VllmEngine(model, section, dtype, length, seed=1, draft_model=draft_model)
    drawn = DrawnLengthsSection(mean=mean, sigma=0.6)
    requests = [
        Request(
            row,
            tuple(Random(row // responses).choices(range(*SAMPLED), k=length)),
            seed=row,
            group_id=row // responses,
            max_tokens=min(longest, drawn.of_row(row)),
        )
        for row in range(prompts * responses)
    ]
    seconds = []
    for repeat in range(WARM_UPS + repeats):
        engine.weights_updated(repeat)
        started = time.perf_counter()
        completions = engine.generate(requests, Sampling(1.0, 1.0, -1, longest, ()))
        if repeat >= WARM_UPS:
            seconds.append(time.perf_counter() - started)
    generated = sum(len(completion.token_ids) for completion in completions)
    assert generated == sum(request.max_tokens or 0 for request in requests), generated
    record = engine.record
    return {
        "acceptance_length": accepted, "draft_tokens": tokens, "max_running": running, "seconds": spread(seconds),
        "tokens": generated, "tokens_per_second": generated / median(seconds), "verifications": record.verifications,
        "drafted_tokens": record.drafted_tokens, "accepted_tokens": record.accepted_tokens,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main_or_rank(main, measure))
