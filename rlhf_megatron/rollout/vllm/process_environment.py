"""Environment of a process before torch, Megatron and vLLM are imported: variables that they read, and which of their
warnings are shown. Imports none of them.
"""

from __future__ import annotations

import functools
import glob
import logging
import os
import re
import sys
import warnings

# How warnings begin that come in every run, on every rank, about what is so on purpose or what nobody here can change.
_OF_EVERY_RUN = (
    "Apex is not installed",  # Transformer Engine has what Megatron would take from it
    "Transformer Engine and Apex are not installed",  # on a CPU
    "Detected a Jax installation but could not find",
    "full scope is deprecated",  # Megatron's own default
    "If you are using transformer_engine as the transformer implementation",  # docs/layouts.md says so of core_attn
    "MimoModelConfig is experimental",
    "The .grad attribute of a Tensor that is not a leaf Tensor",  # Megatron looks whether there is any
    "`torch.distributed.",  # older names of collectives that Megatron uses
)
# The same of vLLM, by the module that logs it.
_LOGGED_IN_EVERY_RUN = {
    "vllm.engine.arg_utils": "The global random seed is set to",  # the engine leaves the process's state as it was
    "vllm.renderers.base": "Using None for EOS token id",  # token ids go in and come out
    "vllm.v1.engine.input_processor": "Passing raw prompts to InputProcessor",
    "vllm.v1.engine.llm_engine": "Passing EngineCoreRequest to LLMEngine",
    "vllm.utils.jit_monitor": "Triton kernel JIT compilation during inference",  # the trainer's, in the same process
}


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU that the process may see; without torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return bool(glob.glob("/dev/nvidia[0-9]*")) and not hidden


def prepare_environment(deterministic: bool = False) -> None:
    """Set what an in-process engine needs; call it before torch or vLLM is imported. What the user has set stays.

    Warnings that come in every run are not shown, unless Python's own settings say which to show (-W, PYTHONWARNINGS).

    ``deterministic``: libraries choose kernels that give the same bits each time, and none by how fast it was here.

    The engine must live in this process (it shares the trainer's GPU and receives weights in place). The sampler of
    FlashInfer is off, since it needs a compiler at run time. On CPUs each rank gets one thread, because ranks that
    share cores with spinning threads slow each other down many times, and nothing is compiled, which costs more than
    it saves.
    """
    settings = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's order of communication and computation relies on it
        # With actor.fp8, scales that are no powers of two, as vLLM's and NeMo-RL's: closer to what is scaled.
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
    }
    if not has_gpu():
        settings |= {
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            # On CPUs vLLM warns about libraries to preload, about what compat.vllm.cpu does on purpose and, through
            # torch's own log, about binding memory to NUMA nodes.
            "VLLM_LOGGING_LEVEL": "ERROR",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
    if deterministic:
        settings |= {
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "TORCHINDUCTOR_DETERMINISTIC": "1",
        }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # vLLM would take this over the size that the recipe gives.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if not sys.warnoptions:
        for begin in _OF_EVERY_RUN:
            warnings.filterwarnings("ignore", re.escape(begin))
    if os.environ["VLLM_LOGGING_LEVEL"] == "WARNING":
        for name, begin in _LOGGED_IN_EVERY_RUN.items():
            logging.getLogger(name).addFilter(functools.partial(_is_news, begin))


def _is_news(begin: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(begin)
