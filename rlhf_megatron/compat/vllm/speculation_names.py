"""Private names of vLLM that speculative decoding uses; a part of those in ``names``."""

from __future__ import annotations

from rlhf_megatron.compat.private_names import PrivateName

_NEWER = "vllm.v1.worker.gpu."

SPECULATION = (
    # Our drafts and samples, by the older runner (compat.vllm.older_speculation).
    PrivateName(
        "vllm.v1.spec_decode.custom_class_proposer", "create_custom_proposer(vllm_config)", "our drafts as vLLM's"
    ),
    *(
        PrivateName("vllm.v1.worker.gpu_model_runner", f"GPUModelRunner.{name}", why)
        for name, why in (
            ("drafter", "our drafts as vLLM's"),
            ("effective_drafter_max_model_len", "drafts beside sequences that are near their end"),
            ("_sample(logits, spec_decode_metadata)", "samples that no draft changes"),
            ("requests", "seeds of requests"),
            ("input_batch", "requests of a step"),
        )
    ),
    *(
        PrivateName("vllm.v1.worker.gpu_input_batch", f"InputBatch.{name}", "requests of a step and their tokens")
        for name in ("num_reqs", "req_ids", "num_tokens_no_spec", "generators", "sampling_metadata")
    ),
    PrivateName("vllm.v1.spec_decode.metadata", "SpecDecodeMetadata.num_draft_tokens", "verification of drafts"),
    PrivateName("vllm.v1.spec_decode.metadata", "SpecDecodeMetadata.draft_token_ids", "verification of drafts"),
    PrivateName("vllm.v1.outputs", "SamplerOutput.sampled_token_ids", "verification of drafts"),
    PrivateName("vllm.v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p(logits, k, p)", "the distribution"),
    PrivateName(
        "vllm.v1.worker.gpu.sample.gumbel",
        "gumbel_sample(logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature)",
        "draws of seed and position",
    ),
    *(
        PrivateName("vllm.config.speculative", f"SpeculativeConfig.{name}", "when there are drafts")
        for name in ("num_speculative_tokens", "num_speculative_tokens_per_batch_size")
    ),
    # Models that draft (compat.vllm.draft_models).
    PrivateName("vllm.model_executor.models.llama_eagle3", "Eagle3LlamaForCausalLM", "a head's own output layer"),
    *(
        PrivateName("vllm.v1.spec_decode.llm_base_proposer", f"SpecDecodeBaseProposer.{name}", "drafts of a model")
        for name in (
            "propose(num_speculative_tokens)",
            "max_model_len",
            "model",
            "num_speculative_tokens",
        )
    ),
    # Drafts and samples by the newer runner (compat.vllm.newer_speculation).
    PrivateName(
        "vllm.config.vllm", "VllmConfig._get_v2_model_runner_unsupported_features", "our drafts by the newer runner"
    ),
    PrivateName(_NEWER + "model_runner", "init_speculator", "our speculator"),
    *(
        PrivateName(_NEWER + "model_runner", f"GPUModelRunner.{name}", why)
        for name, why in (
            ("speculator", "our speculator, and drafts of a model"),
            ("rejection_sampler", "samples that no draft changes"),
            ("take_draft_token_ids", "drafts between steps"),
            ("draft_tokens_handler", "requests of a step"),
            ("req_states", "drafts on the GPU"),
            ("num_speculative_steps", "longest draft"),
            ("max_model_len", "longest sequence"),
        )
    ),
    PrivateName(_NEWER + "cudagraph_utils", "CudaGraphManager._init_candidates", "graphs of steps that draft"),
    PrivateName(_NEWER + "cudagraph_utils", "CudaGraphManager.decode_query_len", "graphs of steps that draft"),
    PrivateName(_NEWER + "states", "RequestState.draft_tokens", "drafts on the GPU"),
    PrivateName(_NEWER + "states", "RequestState.req_id_to_index", "drafts on the GPU"),
    PrivateName(_NEWER + "input_batch", "InputBatch.num_reqs", "sequences of a step"),
    PrivateName(_NEWER + "input_batch", "InputBatch.num_draft_tokens_per_req", "counts of drafts"),
    PrivateName(_NEWER + "spec_decode.utils", "DraftTokensHandler.get_draft_tokens", "requests of a step"),
    PrivateName(_NEWER + "spec_decode.speculator", "BaseSpeculator", "our speculator"),
    PrivateName(
        _NEWER + "spec_decode.speculator", "DraftModelSpeculator.num_speculative_steps", "one step while many run"
    ),
    PrivateName(_NEWER + "spec_decode.rejection_sampler", "rejection_sample", "samples that no draft changes"),
    PrivateName(
        _NEWER + "spec_decode.rejection_sampler_utils",
        "rejection_sample(target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, "
        "expanded_idx_mapping, expanded_local_pos, temperature, seed, num_speculative_steps)",
        "samples that no draft changes",
    ),
    PrivateName(
        _NEWER + "spec_decode.rejection_sampler",
        "compute_topk_logprobs",
        "a kernel of ours for sampled tokens",
        absent="vLLM's own: the same numbers, slower for small models",
        last="0.25.1",
    ),
    PrivateName("vllm.v1.request", "Request.all_token_ids", "text to draft from"),
    PrivateName("vllm.v1.request", "Request.is_prefill_chunk", "no drafts before a prompt's end"),
)
