"""Held-out evaluation: of an exported model by itself, and the estimates that both it and training report."""
