"""rlhf_megatron: RLHF and RLVR of large language models, one SPMD process per GPU, Megatron-core and vLLM.

Importing the package imports nothing else, so that ``--help``, ``--dry-run`` and the recipe checks stay fast and run
without torch, Megatron or vLLM.
"""

import sys

__version__ = "0.1.0"

# Megatron would write checkpoints with this package, and cannot be imported beside a version of it before 0.6.
sys.modules.setdefault("nvidia_resiliency_ext.checkpointing", None)  # type: ignore[arg-type]
