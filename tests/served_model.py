"""An engine that serves two small models by turns, and the same computations by transformers alone."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from hugging_face import load_model, make_model
from repeating_head import make_head, write_head
from rlhf_megatron.recipe import RolloutSection
from rlhf_megatron.rollout.engine import Completion, Request, RolloutEngine, Sampling
from rlhf_megatron.rollout.engine_registry import make_engine

VOCABULARY = 250
MAX_PROMPT, MAX_RESPONSE = 80, 16
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=12, stop_token_ids=())
SAMPLED = Sampling(temperature=0.7, top_p=1.0, top_k=-1, max_tokens=12, stop_token_ids=())


class Served:
    """The engine, the two models whose weights it serves in turn, and what making it did to the process."""

    def __init__(self, folder: Path, name: str = "vllm", **settings: Any) -> None:
        self.folders = [make_model(folder / name, "qwen3", seed=seed) for seed, name in enumerate(("first", "second"))]
        self.speculates = "speculative" in settings
        # A generation_config.json in which every token ends a text: only Sampling's stop tokens may count.
        for path in self.folders:
            (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(VOCABULARY))}))
        self.models = [load_model(path) for path in self.folders]
        # Two prompts of 40 tokens are as many as one step takes.
        longest = MAX_PROMPT + MAX_RESPONSE
        lengths = {"max_response_length": MAX_RESPONSE, "max_num_seqs": 4, "max_num_batched_tokens": longest}
        section = RolloutSection.model_validate(lengths | settings)
        torch.manual_seed(11)
        self.set_num_threads = torch.set_num_threads
        self.before = process_state()
        drafts_by_head = section.speculative is not None and section.speculative.method == "eagle3"
        self.head = make_head(folder / "head", self.folders[0]) if drafts_by_head else None
        model, head = str(self.folders[0]), str(self.head) if self.head else None
        self.engine: RolloutEngine = make_engine(
            model, section, "float32", MAX_PROMPT, seed=5, name=name, draft_model=head
        )
        self.after = process_state()

    def serve(self, model: int, version: int) -> None:
        """Write a model's weights in place and say so."""
        write_fused(self.models[model].state_dict(), self.engine.parameters())
        if self.head:
            write_head(self.head, self.engine.draft_parameters())
        self.engine.weights_updated(version)


def process_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "affinity": os.sched_getaffinity(0),
    }


def write_fused(weights: dict[str, Tensor], parameters: dict[str, Tensor]) -> None:
    """Write transformers' tensors into vLLM's: q, k, v and gate, up stacked; rows of a padded vocabulary left alone."""
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for name, parameter in parameters.items():
        fused = next((kind for kind in parts if kind in name), None)
        pieces = [weights[name.replace(fused, part)] for part in parts[fused]] if fused else [weights[name]]
        value = torch.cat(pieces)
        assert parameter[: len(value)].shape == value.shape
        assert len(parameter) == len(value) or "embed_tokens" in name
        parameter[: len(value)].copy_(value)


def prompts(count: int, length: int = 9) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCABULARY, (length + i % 3,), generator=generator).tolist() for i in range(count)]


def requests_for(token_lists: Sequence[list[int]], first_seed: int = 100) -> list[Request]:
    return [Request(1000 + i, tokens, first_seed + i) for i, tokens in enumerate(token_lists)]


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]
