"""Layouts (degrees -> process groups), teams of ranks, and collectives."""
