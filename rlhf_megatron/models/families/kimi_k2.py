"""Kimi-K2: DeepSeek-V3's form and classes under a name that vLLM knows and transformers does not."""

import dataclasses

from rlhf_megatron.models.families import deepseek_v3

FAMILY = dataclasses.replace(deepseek_v3.FAMILY)
