"""Rollout engines: what generates trajectories, inside the trainer's own process."""
