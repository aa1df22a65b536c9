"""Inputs of steps in which the requests of the step before sample one more token each: all but positions stay.

vLLM's newer model runner makes the inputs of each step out of its plan: it looks up every request, makes a dozen arrays
on the host, copies them to the GPU, and then looks up what each request asks of the sampler. Where a model is small,
that is a third of what a step takes on the host. What is here keeps the inputs of the step before and launches anew the
two kernels that know positions. What a step before may still read is never written to: arrays on the host are new
ones, as vLLM's are, and buffers on the GPU are those that vLLM writes to, in its order. Tables of cache blocks stay
vLLM's, and so do the inputs of all other steps: prompts, requests that come, end or are preempted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.compat.patches import is_known, replacement
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES

# Fields of vLLM's InputBatch: those that differ between two such steps, those that do not, and those that are empty in
# each. A version with others has inputs that nothing here knows of.
_OF_STEP = {"logits_indices", "num_computed_tokens_np", "seq_lens_cpu_upper_bound"}
_STAYS = {
    "req_ids", "num_reqs", "num_reqs_after_padding", "idx_mapping", "idx_mapping_np", "expanded_idx_mapping",
    "expanded_local_pos", "num_scheduled_tokens", "num_tokens", "num_tokens_after_padding", "query_start_loc",
    "query_start_loc_np", "prefill_len_np", "num_computed_prefill_tokens_np", "is_prefilling_np", "cu_num_logits",
    "cu_num_logits_np", "num_logits_per_req", "decode_graph_eligible", "seq_lens", "input_ids", "positions",
    "is_padding",
}  # fmt: skip
_EMPTY = {
    "num_draft_tokens", "num_draft_tokens_per_req", "dcp_local_seq_lens", "max_seq_len_np", "prompt_lens",
    "has_structured_output_reqs", "has_prefill", "max_query_len", "fast_prefill", "dcp_local_seq_lens_cpu_upper_bound",
    "prefill_runs_as_decode_np",
}  # fmt: skip
# What writes to the GPU's buffers, by its parameters.
_LAUNCHES = {
    "prepare_pos_seq_lens(idx_mapping, query_start_loc, num_computed_tokens, pos, seq_lens)",
    "combine_sampled_and_draft_tokens(input_ids, idx_mapping, last_sampled_tokens, query_start_loc, seq_lens, "
    "prefill_len, draft_tokens, cu_num_logits, num_logits, num_new_sampled_tokens)",
}
# What a runner has where anything has a part in its inputs but requests, their tokens and one model's cache.
_PARTS = (
    "speculative_config", "speculator", "rejection_sampler", "num_speculative_steps", "lora_config", "use_pp",
    "use_dcp", "pcp_manager", "supports_mm_inputs", "uses_inputs_embeds", "is_encoder_decoder", "is_pooling_model",
    "fast_prefill", "ubatch_runner", "adaptive_verification", "batch_sharder", "aux_output_connector",
)  # fmt: skip
# What is in a plan of other steps.
_OF_OTHER_PLANS = (
    "scheduled_new_reqs", "preempted_req_ids", "scheduled_spec_decode_tokens", "scheduled_encoder_inputs",
    "has_structured_output_requests",
)  # fmt: skip
# The sampler that is known in every part.
_SAMPLER = {"first": "0.25.1", "last": "0.25.1"}
_PARTS_OF_SAMPLER = {
    "logprobs_mode", "compute_nans", "use_fp64_gumbel", "req_states", "sampling_states", "penalties_state",
    "logit_bias_state", "bad_words_state", "logprob_token_ids_state", "num_speculative_tokens", "use_flashinfer",
}  # fmt: skip


@replacement(
    *PACKAGES,
    **KNOWN,
    why="vLLM's newer runner makes all inputs anew in each step, also where nothing but positions has changed",
    upstream="https://github.com/vllm-project/vllm/pull/17866",
)
@contextlib.contextmanager
def kept(runner: Any) -> Iterator[None]:
    """Have vLLM's model ``runner`` keep inputs from step to step, where the same requests sample one token each.

    What is sampled is the same to the last bit. All is vLLM's own for its older runner, in a version that is not known,
    with drafts, adapters, pipeline or context parallelism, images, and for models whose state is not that of attention
    alone.
    """
    if not is_known(PACKAGES, **KNOWN) or not _is_plain(runner) or not _are_known(_parts_of_inputs()):
        yield
        return
    steps = _Steps(runner)
    runner.add_requests, runner.prepare_inputs = steps.add_requests, steps.prepare_inputs
    if _has_known_sampler(runner):
        runner.sample = steps.sample
    try:
        yield
    finally:
        for name in ("add_requests", "prepare_inputs", "sample"):
            vars(runner).pop(name, None)  # the class's own are there again


def _is_plain(runner: Any) -> bool:
    """Say whether a runner is the newer one and samples one token of each request, with nothing else in its inputs."""
    if not hasattr(runner, "speculator") or any(getattr(runner, each, None) for each in _PARTS):
        return False
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    state, sampler, config = runner.model_state, runner.sampler, runner.vllm_config
    own = Sampler.__module__.rpartition(".")[0]
    processors = getattr(sampler, "logits_processors", ())  # of users too, which may want to be asked in each step
    return (
        type(state) is DefaultModelState  # delta nets and others have states of their own
        and type(sampler) is Sampler
        and state.num_new_sampled_tokens_per_step == 1
        and runner.dp_size == 1  # else others' steps have dummy inputs in between
        and getattr(runner.model_config, "rswa_window", None) is None
        and getattr(config, "kv_transfer_config", None) is None
        and all(type(each).__module__.startswith(own) for each in processors)
    )


def _parts_of_inputs() -> frozenset[str]:
    """Return the fields of this version's inputs, and what writes to the GPU's buffers with its parameters."""
    from vllm.v1.worker.gpu import input_batch

    launches = input_batch.prepare_pos_seq_lens, input_batch.combine_sampled_and_draft_tokens
    return frozenset(
        {
            *(field.name for field in dataclasses.fields(input_batch.InputBatch)),
            *(f"{each.__name__}({', '.join(inspect.signature(each).parameters)})" for each in launches),
        }
    )


@functools.cache
def _are_known(parts: frozenset[str]) -> bool:
    """Say whether all parts of vLLM's inputs are known; warn, once, if not."""
    unknown = sorted(parts - (_OF_STEP | _STAYS | _EMPTY | _LAUNCHES))
    if unknown:
        warnings.warn(
            f"vLLM's inputs of a step have what this version of rlhf_megatron does not know ({', '.join(unknown)}); "
            "they are made anew in each step",
            stacklevel=2,
        )
    return not unknown


def _has_known_sampler(runner: Any) -> bool:
    """Say whether what ``_Steps.sample`` leaves out of the sampler is known."""
    sampler = runner.sampler
    return is_known(PACKAGES, **_SAMPLER) and vars(sampler).keys() == _PARTS_OF_SAMPLER and not sampler.compute_nans


class _Steps:
    """Steps of a runner, of which each may have the inputs of the one before."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._states, self._buffers = runner, runner.req_states, runner.input_buffers
        self._vllms_add, self._vllms_prepare = runner.add_requests, runner.prepare_inputs
        self._vllms_sample = runner.sample
        self._before: Any = None  # vLLM's InputBatch of the step before, if its requests may sample on with it
        self._graph: Any = None  # the CUDA graph of that step
        self._kept = False  # whether the latest inputs are those of the step before
        self._draws: _Draws | None = None  # of the requests of the latest inputs, once they were asked for

    def add_requests(self, planned: Any) -> None:
        """Take in the new requests of a plan, as vLLM's method of this name does, which copies all tables even if there
        are none."""
        if planned.scheduled_new_reqs:
            self._before = None
            self._vllms_add(planned)

    def prepare_inputs(self, planned: Any, *more: Any) -> Any:
        """Return the inputs of a step, as vLLM's method of this name does."""
        graph = next(each for each in more if hasattr(each, "cg_mode"))
        inputs = self._next(planned, graph) if self._before is not None else None
        self._kept = inputs is not None
        if inputs is None:
            inputs = self._vllms_prepare(planned, *more)
            self._draws = None
        self._before, self._graph = (inputs if self._kept or _may_stay(inputs) else None), graph
        return inputs

    def _next(self, planned: Any, graph: Any) -> Any:
        """Return inputs made of those before, or None, and nothing has changed, where more than positions differs."""
        before = self._before
        if (
            graph != self._graph
            or planned.total_num_scheduled_tokens != before.num_reqs
            or any(getattr(planned, each) for each in _OF_OTHER_PLANS)
            or list(planned.num_scheduled_tokens) != before.req_ids
        ):
            return None
        computed = self._states.num_computed_tokens_np[before.idx_mapping_np]
        if (computed < before.prefill_len_np).any():
            return None
        lengths = np.zeros(before.num_reqs_after_padding, dtype=np.int32)
        np.add(computed, before.num_scheduled_tokens, out=lengths[: before.num_reqs])
        return dataclasses.replace(
            before,
            logits_indices=self._launch(before),
            num_computed_tokens_np=computed,
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
        )

    def _launch(self, before: Any) -> Tensor:
        """Write positions, lengths and sampled tokens to the GPU's buffers; return the rows that have logits."""
        from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens, prepare_pos_seq_lens

        states, buffers = self._states, self._buffers
        prepare_pos_seq_lens(
            before.idx_mapping,
            before.query_start_loc,
            states.num_computed_tokens.gpu,
            buffers.positions,
            buffers.seq_lens,
        )
        rows: Tensor = combine_sampled_and_draft_tokens(
            buffers.input_ids,
            before.idx_mapping,
            states.last_sampled_tokens,
            before.query_start_loc,
            before.seq_lens,
            states.prefill_len.gpu,
            states.draft_tokens,
            before.cu_num_logits,
            before.num_reqs,
            1,
        )
        return rows

    def sample(self, hidden_states: Tensor, inputs: Any, grammar: Any) -> Any:
        """Return vLLM's SamplerOutput, with the numbers of sampled and of rejected tokens [requests], as its method of
        this name does."""
        if not self._kept or inputs is not self._before or grammar is not None:
            return self._vllms_sample(hidden_states, inputs, grammar)
        sampler = self._runner.sampler
        if self._draws is None:
            self._draws = _draws_of(sampler, inputs)
        if not self._draws.are_plain:
            return self._vllms_sample(hidden_states, inputs, grammar)
        # A token of each request: its row is its number, so what vLLM gathers is the beginning.
        logits = self._runner.model.compute_logits(hidden_states[: inputs.num_reqs])
        output = _sampled(sampler, logits, inputs, self._draws)
        return output, output.num_sampled, output.num_rejected


def _may_stay(inputs: Any) -> bool:
    """Say whether each request of a step samples one token, and nothing else is in its inputs."""
    if inputs.num_tokens != inputs.num_reqs or inputs.is_prefilling_np.any():
        return False
    values = (getattr(inputs, each, None) for each in _EMPTY)
    return all(value is None or (isinstance(value, int) and not value) for value in values)


@dataclasses.dataclass(frozen=True, slots=True)
class _Draws:
    """How the requests of a step draw their tokens; the same as long as they are the same requests.

    Attributes:
        are_plain: by logits and temperature alone.
        has_temperature: one of them has another than 0 and 1.
        num_logprobs: of how many tokens besides the sampled one they want logprobs, at most; vLLM's -1 for none at all.
        sampled: [requests], ones: how many tokens each samples.
        rejected: [requests], zeros.
    """

    are_plain: bool
    has_temperature: bool
    num_logprobs: int
    sampled: Tensor
    rejected: Tensor


def _draws_of(sampler: Any, inputs: Any) -> _Draws:
    states, rows = sampler.sampling_states, inputs.idx_mapping_np
    others = (
        sampler.penalties_state.use_penalty[rows],
        sampler.logit_bias_state.use_logit_bias[rows],  # allowed tokens and least lengths too
        sampler.bad_words_state.num_bad_words.np[rows],
        sampler.logprob_token_ids_state.num_token_ids.np[rows],
        states.min_p.np[rows],
        states.top_k.np[rows] != states.vocab_size,
        states.top_p.np[rows] != 1,
    )
    temperature = states.temperature.np[rows]
    sampled = inputs.seq_lens.new_ones(inputs.num_reqs)
    return _Draws(
        are_plain=not any(np.any(each) for each in others),
        has_temperature=not np.all((temperature == 0) | (temperature == 1)),
        num_logprobs=states.max_num_logprobs(rows),
        sampled=sampled,
        rejected=torch.zeros_like(sampled),
    )


def _sampled(sampler: Any, logits: Tensor, inputs: Any, draws: _Draws) -> Any:
    """Return vLLM's SamplerOutput of plain draws, by the kernels that its sampler calls for them."""
    from vllm.v1.worker.gpu.sample import sampler as of_vllm
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature

    states, requests = sampler.sampling_states, inputs.idx_mapping
    processed = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
    if draws.has_temperature:
        apply_temperature(processed, requests, states.temperature.gpu)
    tokens = of_vllm.gumbel_sample(
        processed,
        requests,
        states.temperature.gpu,
        states.seeds.gpu,
        inputs.positions[: inputs.num_reqs],
        apply_temperature=False,
        use_fp64=sampler.use_fp64_gumbel,
    )
    logprobs = None
    if draws.num_logprobs >= 0:
        of = processed if sampler.logprobs_mode == "processed_logprobs" else logits
        logprobs = of_vllm.compute_topk_logprobs(of, draws.num_logprobs, tokens)  # or ours (compat.vllm.logprobs)
    return of_vllm.SamplerOutput(
        sampled_token_ids=tokens.view(-1, 1),
        logprobs_tensors=logprobs,
        num_nans=None,
        num_sampled=draws.sampled,
        num_rejected=draws.rejected,
    )
