"""Checks before a GPU-hour is spent: of the machines, of what must be the same on all ranks, and of the links.

Every check is a function that returns a ``Check``. What needs data, tokenizers and rewards stands in
preflight/preflight.py, which also puts all of them together.
"""
