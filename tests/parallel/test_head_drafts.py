"""vLLM drafts what torch computes of a head, whose weights are written into its parameters by our table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hugging_face import make_model
from kept_drafts import keep_drafts
from parallel.ranks import run_ranks
from small_heads import HeadReference, make_head

VOCABULARY, COUNT, PROMPT = 250, 3, [5, 6, 7, 8] * 4


class Case(NamedTuple):
    """A model, the tokens and layers of its head, and the ranks of a replica."""

    family: str
    drafted: int
    layers: tuple[int, ...]
    tensor: int


CASES = {
    "some tokens": Case("qwen3", 90, (1, 2, 3), 1),
    "all tokens, two hidden states": Case("qwen3", VOCABULARY, (0, 4), 1),
    "two ranks": Case("llama", 90, (1, 2, 4), 2),
    "scaled embeddings": Case("granite", 90, (0, 1, 3), 1),
    "experts": Case("qwen3_moe", 90, (1, 2, 3), 1),
}


def drafts_of_head(model: str, head: str, config: str, tensor: int) -> dict[str, Any]:
    """Return what vLLM's head has drafted in a generation, and behind which tokens; ``config``: what vLLM reads."""
    from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

    prepare_environment()
    import torch.distributed as dist

    from rlhf_megatron.compat.vllm import internals
    from rlhf_megatron.models.architecture import read_architecture
    from rlhf_megatron.models.draft_heads import read_head, write_head_config
    from rlhf_megatron.models.draft_vocabulary import OFFSETS_IN_VLLM, read_draft_vocabulary
    from rlhf_megatron.models.hf_files import CheckpointFiles
    from rlhf_megatron.models.weight_map import rollout_blocks
    from rlhf_megatron.models.weight_source import load_blocks
    from rlhf_megatron.recipe import RolloutSection
    from rlhf_megatron.rollout.engine import Request, Sampling
    from rlhf_megatron.rollout.engine_registry import make_engine

    description = read_head(head, read_architecture(model))
    if dist.get_rank() == 0:
        write_head_config(Path(config), description, head)
    dist.barrier()
    settings = {
        "max_response_length": 16,
        "max_num_seqs": 3,
        "layout": {"tensor": tensor},
        "speculative": {"method": "eagle3", "num_speculative_tokens": COUNT},
    }
    section = RolloutSection.model_validate(settings)
    engine = make_engine(model, section, "float32", 40, seed=1, draft_model=config)
    with CheckpointFiles(model, read_architecture(model)) as files:
        load_blocks(rollout_blocks(read_architecture(model), tensor, dist.get_rank()), engine.parameters(), files)
    parameters = engine.draft_parameters()
    if OFFSETS_IN_VLLM in parameters:
        parameters.pop(OFFSETS_IN_VLLM).copy_(read_draft_vocabulary(head, description).offsets)
    with CheckpointFiles(head, description) as files:
        load_blocks(rollout_blocks(description, tensor, dist.get_rank()), parameters, files)
    engine.weights_updated(1)
    drafts = keep_drafts(internals.model_runner(engine._engine))  # type: ignore[attr-defined]
    asked = [Request(row, [*PROMPT, 20 + row], 70 + row, row) for row in range(3)]
    engine.generate(asked, Sampling(1.0, 1.0, -1, 16, ()))
    return {"drafts": drafts, "drafted": engine.record.drafted_tokens}


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 on vLLM's CPU kernels; here vLLM would take the GPU")
@pytest.mark.parametrize("name", CASES)
def test_vllm_drafts_what_torch_computes(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = make_model(tmp_path / "model", case.family, tied=False, vocabulary=VOCABULARY, num_hidden_layers=4)
    # Weights as large as these make drafts that differ.
    head = make_head(tmp_path / "head", model, case.drafted, case.layers, scale=0.3)
    given = {"model": str(model), "head": str(head), "config": str(tmp_path / "config"), "tensor": case.tensor}
    by_rank = run_ranks(drafts_of_head, case.tensor, given)
    assert all(of_rank == by_rank[0] for of_rank in by_rank)
    drafts, reference = by_rank[0]["drafts"], HeadReference(model, head)
    assert by_rank[0]["drafted"] >= COUNT * 30
    with torch.no_grad():
        assert [draft for _, draft in drafts] == [reference.draft(tokens, COUNT) for tokens, _ in drafts]
    assert len({tuple(draft) for _, draft in drafts}) > 20
