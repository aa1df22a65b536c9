"""Private names of vLLM's newer model runner that inputs of steady steps are kept by; a part of those in ``names``."""

from __future__ import annotations

from rlhf_megatron.compat.private_names import PrivateName

_RUNNER = "vllm.v1.worker.gpu."
_WHY = "inputs that are kept from step to step"

RUNNER = (
    *(
        PrivateName(_RUNNER + "model_runner", f"GPUModelRunner.{name}", _WHY)
        for name in (
            "add_requests(scheduler_output)",
            "dp_size",
            "input_buffers",
            "is_encoder_decoder",
            "is_pooling_model",
            "lora_config",
            "model",
            "model_config",
            "model_state",
            "prepare_inputs(scheduler_output)",
            "sample(hidden_states, input_batch, grammar_output)",
            "sampler",
            "speculative_config",
            "supports_mm_inputs",
            "use_dcp",
            "use_pp",
            "vllm_config",
        )
    ),
    *(
        PrivateName(_RUNNER + "states", f"RequestState.{name}", _WHY)
        for name in ("last_sampled_tokens", "num_computed_tokens", "num_computed_tokens_np", "prefill_len")
    ),
    *(
        PrivateName(_RUNNER + "input_batch", f"InputBuffers.{name}", _WHY)
        for name in ("input_ids", "positions", "seq_lens")
    ),
    *(
        PrivateName(_RUNNER + "input_batch", f"InputBatch.{name}", _WHY)
        for name in (
            "cu_num_logits",
            "idx_mapping",
            "idx_mapping_np",
            "is_prefilling_np",
            "logits_indices",
            "num_computed_tokens_np",
            "num_reqs_after_padding",
            "num_scheduled_tokens",
            "num_tokens",
            "positions",
            "prefill_len_np",
            "query_start_loc",
            "req_ids",
            "seq_lens",
            "seq_lens_cpu_upper_bound",
        )
    ),
    PrivateName(
        _RUNNER + "input_batch",
        "prepare_pos_seq_lens(idx_mapping, query_start_loc, num_computed_tokens, pos, seq_lens)",
        _WHY,
    ),
    PrivateName(
        _RUNNER + "input_batch",
        "combine_sampled_and_draft_tokens(input_ids, idx_mapping, last_sampled_tokens, query_start_loc, seq_lens, "
        "prefill_len, draft_tokens, cu_num_logits, num_logits, num_new_sampled_tokens)",
        _WHY,
    ),
    PrivateName(_RUNNER + "cudagraph_utils", "BatchExecutionDescriptor.cg_mode", _WHY),
    PrivateName(_RUNNER + "model_states.default", "DefaultModelState", _WHY),
    PrivateName(_RUNNER + "model_states.interface", "ModelState.num_new_sampled_tokens_per_step", _WHY),
    *(
        PrivateName("vllm.v1.core.sched.output", f"SchedulerOutput.{name}", _WHY)
        for name in (
            "has_structured_output_requests",
            "num_scheduled_tokens",
            "preempted_req_ids",
            "scheduled_encoder_inputs",
            "scheduled_new_reqs",
            "scheduled_spec_decode_tokens",
            "total_num_scheduled_tokens",
        )
    ),
    # The sampler, of which one version alone is known in all its parts.
    PrivateName(_RUNNER + "sample.sampler", "Sampler.sampling_states", _WHY),
    *(
        PrivateName(_RUNNER + "sample.sampler", f"{name}", "samples without look-ups")
        for name in ("SamplerOutput", "gumbel_sample")
    ),
    PrivateName(
        _RUNNER + "sample.gumbel",
        "apply_temperature(logits, expanded_idx_mapping, temperature)",
        "samples without look-ups",
    ),
)
