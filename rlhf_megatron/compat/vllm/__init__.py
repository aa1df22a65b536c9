"""Every use of what vLLM does not promise: patches (cpu, logprobs, shared_weights, speculation) and private attributes
(internals, load_tracing). ``names`` lists them all, and the versions that are known; vLLM itself is imported late,
after ``prepare_environment``.
"""
