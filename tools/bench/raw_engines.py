"""vLLM and Megatron called directly, without anything of ours around them: what the benchmarks compare with.

vLLM: ``LLM.generate`` with plain sampling, without seeds and logprobs. Megatron: the model, its own cross entropy and
backward(), a micro-batch after the other; of a pipeline its own schedule. No reduction of gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlhf_megatron.data.packing import MicroBatch
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.topology.exchange import max_over_ranks

if TYPE_CHECKING:
    from vllm import SamplingParams

    from rlhf_megatron.roles.role import Role
    from rlhf_megatron.rollout.engine import RolloutEngine
    from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine

WARM_UP_PIECES = 2  # prompts or micro-batches


def generate(engine: RolloutEngine, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Return the tokens that vLLM answers each prompt with, as many as ``lengths`` say."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine

    assert isinstance(engine, VllmEngine), engine
    asked = [
        SamplingParams(
            max_tokens=length, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        for length in lengths
    ]  # fmt: skip
    torch.manual_seed(1)  # tensor-parallel ranks draw alike
    engine.drop_paused()
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [list(answer.outputs[0].token_ids) for answer in answers_of(engine, given, asked)]


def answers_of(
    engine: VllmEngine, prompts: Sequence[Mapping[str, Any]], parameters: Sequence[SamplingParams]
) -> list[Any]:
    """Return outputs of ``LLM.generate``, which has the engine's own scratch memory."""
    with engine._workspace.in_use():
        outputs: list[Any] = engine._llm.generate(prompts, parameters, use_tqdm=False)
        return outputs


def micro_batches(role: Role, batch: RolloutBatch) -> list[MicroBatch]:
    """Return the micro-batches of this rank's share of the rows; the packing is the role's own."""
    passes, budget = role._passes, role.section.update_tokens * role.layout.context
    plan = passes._plan(batch, budget, rows_together=1, multiple=1)
    return [passes._micro_batch(batch, rows, {}, False, passes._alignment) for rows in plan]


def forward(role: Role, micros: Sequence[MicroBatch]) -> None:
    """Compute the loss of each micro-batch, without gradients."""
    with torch.no_grad():
        _pass(role, micros, forward_only=True)


def forward_and_backward(role: Role, micros: Sequence[MicroBatch]) -> None:
    """Compute the gradients of all micro-batches."""
    assert role.trainer is not None
    role.trainer.chunks[0].zero_grad_buffer()
    _pass(role, micros, forward_only=False)


def _pass(role: Role, micros: Sequence[MicroBatch], forward_only: bool) -> None:
    if role.layout.pipeline > 1:
        _through_pipeline(role, micros, forward_only)
        return
    for micro in micros:
        loss = _loss(role, _output(role, micro), micro)
        if not forward_only:
            loss.backward()


def _through_pipeline(role: Role, micros: Sequence[MicroBatch], forward_only: bool) -> None:
    """Run Megatron's one-forward-one-backward schedule, over the links that it has in the role."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(pieces: Iterator[MicroBatch], _: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        micro = next(pieces)
        count = torch.zeros([], dtype=torch.int)
        return _output(role, micro), lambda output: (_loss(role, output, micro), count, {})

    get_forward_backward_func(pp_size=role.layout.pipeline, vp_size=None)(
        forward_step_func=step,
        data_iterator=iter(micros),
        model=role._passes._chunks,
        num_microbatches=len(micros),
        seq_length=1,  # a hint only: shapes travel with the activations
        micro_batch_size=1,
        forward_only=forward_only,
        pg_collection=role.groups,
        p2p_communicator=role._passes._communicator,
    )


def _output(role: Role, micro: MicroBatch) -> torch.Tensor:
    """Return the output of this rank's part of the model: logits, or at an earlier stage hidden states."""
    from rlhf_megatron.models.packed_sequences import PackedSequences

    packed = PackedSequences(  # Megatron's, with what delta nets read besides
        qkv_format="thd", cu_seqlens_q=micro.cu_seqlens, cu_seqlens_kv=micro.cu_seqlens,
        max_seqlen_q=micro.longest, max_seqlen_kv=micro.longest, positions=micro.positions,
        parts=role.layout.context,
    )  # fmt: skip
    output: torch.Tensor = role._passes._chunks[0](
        micro.tokens[None], micro.positions[None], None, packed_seq_params=packed
    )
    return output


def _loss(role: Role, logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    # Which tokens are the targets makes no difference to the time.
    losses = vocab_parallel_cross_entropy(
        logits.transpose(0, 1).contiguous(), micro.tokens[:, None], tp_group=role.groups.tp
    )
    return losses.mean()


def seconds_of(action: Callable[[int | None], Any], repeats: int) -> list[float]:
    """Time each of ``repeats`` calls on the slowest rank; collective.

    ``action``: told how many pieces of its work to do: a few to warm up, which does not count, then all (None).
    """
    seconds = []
    for pieces in (WARM_UP_PIECES, *[None] * repeats):
        _synchronize()
        dist.barrier()
        began = time.perf_counter()
        action(pieces)
        _synchronize()
        seconds.append(max_over_ranks([time.perf_counter() - began])[0])
    return seconds[1:]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
