"""Check, by Triton's interpreter, that vLLM's newer model runner samples with drafts what it samples without them.

A script for ``triton_kernels.run_in_interpreter``. vLLM 0.32 can run this runner on CPUs that Triton has a backend for.
"""

from __future__ import annotations

import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
from triton.backends import backends
from triton.runtime import interpreter

PROMPT, LENGTH, ROWS = [5, 6, 7, 8] * 4, 10, 4
# What drafts; the last for a benchmark.
CASES: dict[str, dict[str, Any] | None] = {
    "without": None,
    "suffix": {"method": "suffix", "match": 1, "num_speculative_tokens": 2},
    "head": {"method": "eagle3"},
    "benchmark": {"method": "suffix", "synthetic_acceptance_length": 2.0},
}


def stand_in_for_a_backend() -> None:
    """Have vLLM find a backend for CPUs, in whose place the interpreter is, which NumPy 2.4 breaks in one place."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    of_cpu: Any = types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: True), compiler=None)
    backends["cpu"] = of_cpu
    patch_tensors = interpreter._patch_lang_tensor

    def take_one_element_as_a_number(tensor: Any, scope: Any) -> None:
        patch_tensors(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = take_one_element_as_a_number


def generate(model: str, head: str, speculative: dict[str, Any] | None) -> tuple[list[Any], Any]:
    """Return what an engine answers, twice where text of the first time is drafted, and the record of the last."""
    from rlhf_megatron.compat.vllm import internals
    from rlhf_megatron.recipe import RolloutSection
    from rlhf_megatron.rollout.engine import Request, Sampling
    from rlhf_megatron.rollout.engine_registry import make_engine

    settings = {"max_response_length": LENGTH, "max_num_seqs": ROWS, "max_num_batched_tokens": 128}
    section = RolloutSection.model_validate({**settings, "speculative": speculative})
    engine: Any = make_engine(model, section, "float32", len(PROMPT), 1, "auto", draft_model=head)
    assert hasattr(internals.model_runner(engine._engine), "speculator"), "the newer runner"
    engine.weights_updated(1)
    lengths = [LENGTH, LENGTH, LENGTH - 5, LENGTH - 6]
    asked = [Request(row, PROMPT, 70 + row, 0, max_tokens=lengths[row]) for row in range(ROWS)]
    for _ in range(2 if speculative and speculative["method"] == "suffix" else 1):
        completions = engine.generate(asked, Sampling(0.3, 1.0, -1, LENGTH, ()))
    engine.close()
    return completions, engine.record


def drafts_of_layer(folder: str) -> list[tuple[list[int], list[int]]]:
    """Return sequences, and what an engine's layer has drafted after each."""
    from rlhf_megatron.compat.vllm import internals
    from rlhf_megatron.recipe import RolloutSection
    from rlhf_megatron.rollout.engine import Request, Sampling
    from rlhf_megatron.rollout.engine_registry import make_engine

    speculative = {"method": "mtp", "max_running": 2}
    settings = {"max_response_length": LENGTH, "max_num_seqs": ROWS, "max_num_batched_tokens": 128}
    section = RolloutSection.model_validate({**settings, "speculative": speculative})
    engine: Any = make_engine(folder, section, "float32", len(PROMPT), 1, "auto")
    engine.weights_updated(1)
    runner, scheduler = internals.model_runner(engine._engine), internals.scheduler(engine._engine)
    take, drafts = runner.take_draft_token_ids, []

    def take_and_keep() -> Any:
        taken = take()
        for name, draft in zip(taken.req_ids, taken.draft_token_ids, strict=True):
            request = scheduler.requests.get(name)
            if draft and request is not None and not request.is_finished():
                row = runner.req_states.req_id_to_index[name]
                drafts.append((list(request.all_token_ids), runner.req_states.draft_tokens[row].tolist()))
        return taken

    runner.take_draft_token_ids = take_and_keep
    # The first two have no drafts, while four run.
    asked = [Request(row, PROMPT, 70 + row, 0, max_tokens=4 if row < 2 else LENGTH) for row in range(ROWS)]
    engine.generate(asked, Sampling(1.0, 1.0, -1, LENGTH, ()))
    engine.close()
    return drafts


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    stand_in_for_a_backend()
    from hugging_face import make_model
    from repeating_head import make_head
    from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
    from small_predictions import PredictionReference, make_predicting_model

    prepare_environment()
    from rlhf_megatron.compat.vllm import newer_speculation

    newer_speculation.take_drafts_of_text()
    newer_speculation.capture_drafting_steps()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        head = make_head(Path(folder) / "head", model)
        results = {name: generate(str(model), str(head), speculative) for name, speculative in CASES.items()}
        layer = make_predicting_model(Path(folder) / "layer", "glm4_moe", scale=0.3, copies=True, tied=False)
        drafts, reference = drafts_of_layer(str(layer)), PredictionReference(layer)
        assert [draft for _, draft in drafts] == [reference.draft(of, 3) for of, _ in drafts]
        assert len(drafts) > 5 and all(len(of) >= len(PROMPT) + 4 for of, _ in drafts), "few run"
    plain = results["without"][0]
    for name, (completions, record) in results.items():
        if name == "benchmark":
            assert 1 + record.accepted_tokens / record.verifications == 2.0, record
            continue
        assert [each.token_ids for each in completions] == [each.token_ids for each in plain], name
        logprobs = [np.concatenate([each.logprobs for each in of]) for of in (completions, plain)]
        np.testing.assert_allclose(*logprobs, atol=1e-4)
        assert (record.accepted_tokens > 0) == (name != "without"), (name, record)
        assert record.accepted_tokens <= record.drafted_tokens, record


if __name__ == "__main__":
    main()
