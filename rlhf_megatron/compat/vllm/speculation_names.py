"""Private names of vLLM that speculative decoding uses; a part of those in ``names``."""

from __future__ import annotations

from rlhf_megatron.compat.private_names import PrivateName

SPECULATION = (
    # Our drafts and samples, by the older runner (compat.vllm.speculation).
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
)
