"""Algorithms: pure functions over tensors. The loops choose among them by the names in a recipe."""
