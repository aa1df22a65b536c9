"""Output of a run for its user: metrics, trackers, console, plots, the run folder and the environment it ran in.

Nothing here computes a metric or talks to other ranks: a loop hands over final numbers, on one rank.
"""
