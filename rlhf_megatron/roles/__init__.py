"""Roles: the models of a run, each in its own layout, with what they compute and how they learn."""
