"""Private names of Megatron-core that are used here, and the versions in which they were looked up or run."""

from __future__ import annotations

from rlhf_megatron.compat.private_names import REGISTRY, PrivateName

PACKAGES = ("megatron-core",)
KNOWN = {"first": "0.19.2", "last": "0.19.2"}
"""The versions that were run."""

_RANDOM, _MAPPINGS = "megatron.core.tensor_parallel.random", "megatron.core.tensor_parallel.mappings"
_DATA_PARALLEL = "megatron.core.distributed.distributed_data_parallel"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer"
_LANGUAGE = "megatron.core.models.common.language_module."
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"

NAMES = (
    PrivateName("megatron.core.parallel_state", "_GLOBAL_MEMORY_BUFFER", "scratch memory of sequence parallelism"),
    PrivateName("megatron.core.parallel_state", "_set_global_memory_buffer", "scratch memory of sequence parallelism"),
    PrivateName(
        _LANGUAGE + "language_module",
        "LanguageModule.tie_embeddings_and_output_weights_state_dict"
        "(sharded_state_dict, output_layer_weight_key, first_stage_word_emb_key, metadata)",
        "checkpoints of tied embeddings",
    ),
    PrivateName("megatron.core.utils", "make_tp_sharded_tensor_for_checkpoint", "checkpoints of tied embeddings"),
    PrivateName("megatron.core.transformer.torch_norm", "WrappedTorchNorm", "norms under sequence parallelism"),
    PrivateName(
        _DISPATCHER,
        "MoEAlltoAllTokenDispatcher.combine_postprocess(permutated_local_input_tokens)",
        "memory of layers of experts that are computed again",
    ),
    PrivateName(
        "megatron.core.transformer.moe.moe_utils",
        "sort_chunks_by_idxs(input, split_sizes, sorted_idxs, probs, fused)",
        "tokens in their order",
    ),
    # Router replay.
    PrivateName("megatron.core.transformer.moe.router", "TopKRouter.router_replay", "experts chosen elsewhere"),
    PrivateName(
        "megatron.core.transformer.moe.router_replay",
        "RouterReplay.get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)",
        "experts that are chosen elsewhere",
    ),
    # Weights gathered while passes compute.
    PrivateName(_DATA_PARALLEL, "DistributedDataParallel.param_to_bucket_group", "weights on their way"),
    PrivateName(_DATA_PARALLEL, "DistributedDataParallel.disable_forward_pre_hook(param_sync)", "weights on their way"),
    PrivateName(_BUCKETS, "_ParamAndGradBucketGroup.param_gather_handle", "weights on their way"),
    PrivateName(_BUCKETS, "_ParamAndGradBucketGroup.start_param_sync()", "weights on their way"),
    PrivateName(
        _BUCKETS, "_ParamAndGradBucketGroup.finish_param_sync(skip_next_bucket_dispatch)", "weights on their way"
    ),
    # Machines without a GPU.
    PrivateName(_RANDOM, "_get_cuda_rng_state", "random states of the CPU"),
    PrivateName(_RANDOM, "_set_cuda_rng_state", "random states of the CPU"),
    PrivateName(_RANDOM, "CudaRNGStatesTracker.fork(name)", "random states of the CPU"),
    PrivateName(_RANDOM, "CudaRNGStatesTracker.states_", "random states of the CPU"),
    PrivateName(_MAPPINGS, "_gather_along_first_dim(input_, group, output_split_sizes)", "uneven parts over gloo"),
    PrivateName(
        _MAPPINGS, "_reduce_scatter_along_first_dim(input_, group, input_split_sizes)", "uneven parts over gloo"
    ),
    PrivateName(_DISPATCHER, "maybe_move_tensor_to_cpu", "counts of tokens"),
)

REGISTRY[PACKAGES] = NAMES
