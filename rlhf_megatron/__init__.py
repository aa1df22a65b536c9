"""rlhf_megatron: RLHF and RLVR of large language models, one SPMD process per GPU, Megatron-core and vLLM.

This file holds the version only. Importing the package imports nothing else, so that `--help`, `--dry-run` and the
recipe checks stay fast and run without torch, Megatron or vLLM.
"""

__version__ = "0.1.0"
