"""Triton kernels, each with a plain torch reference beside it. Imported as ``rlhf_megatron.kernels``, never as
``kernels``.

A package called ``kernels`` exists on PyPI and transformers looks for it, so this folder must not be found under that
name: setup.py maps it into the package and the repository root never goes on sys.path.
"""
