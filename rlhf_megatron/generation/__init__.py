"""Rollout: from prompts to scored trajectories, by vLLM replicas that share one queue. Knows no training loop."""
