"""Every use of what Megatron-core, vLLM and torch do not promise: patches, and private names that are read.

Each patch names the versions it was run with, its reason and the upstream discussion (patches.py). An upgrade is a look
at this folder and nowhere else.
"""
