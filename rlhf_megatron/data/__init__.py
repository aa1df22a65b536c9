"""Prompts, tokenizers, and the packed batches that every phase of a step reads; nothing imports megatron or vllm."""
