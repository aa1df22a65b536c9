"""Rewards by rule: GSM8K, mathematics, reasoning-gym, and a user's own function.

This file stays empty: the worker processes import this package, and nothing they import may load torch.
"""
