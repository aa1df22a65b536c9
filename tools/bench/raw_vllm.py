"""vLLM as its users run it, in a process of its own: the seconds of answers of known lengths.

    python tools/bench/raw_vllm.py SETTINGS.json OUTPUT.json

The settings: what ``vllm.LLM`` takes as ``engine``, variables of the ``environment``, the ``prompts`` (token ids), the
``lengths`` of their answers, and ``repeats``, before which there is one that does not count. Between them the cache of
prompts is emptied, as new weights do. Nothing of ours is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def seconds_of_answers(settings: dict[str, Any]) -> list[float]:
    """Return the seconds of each repeat; raises RuntimeError where an answer is not as long as asked."""
    from vllm import LLM, SamplingParams

    engine = LLM(**settings["engine"])
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in settings["prompts"]]
    lengths = settings["lengths"]
    asked = [SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False) for length in lengths]
    seconds = []
    for _ in range(settings["repeats"] + 1):
        engine.reset_prefix_cache()
        began = time.perf_counter()
        answers = engine.generate(prompts, asked, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
        if [len(answer.outputs[0].token_ids) for answer in answers] != lengths:
            raise RuntimeError("an answer of vLLM is not as long as asked")
    return seconds[1:]


def main() -> None:
    """Measure by the settings, leave the result in a file."""
    settings, output = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    os.environ.update(settings["environment"])  # vLLM reads it when it is imported
    output.write_text(json.dumps(seconds_of_answers(settings)), encoding="utf-8")


if __name__ == "__main__":
    main()
