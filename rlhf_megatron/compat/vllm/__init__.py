"""Every use of what vLLM does not promise: patches, each with a record (``compat.patches``), and private attributes
(internals). ``names`` lists all that is private, and the versions that are known; vLLM itself is imported late, after
``prepare_environment``.
"""
