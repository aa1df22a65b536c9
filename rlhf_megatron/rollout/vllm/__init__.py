"""The rollout engine that is vLLM in the trainer's process."""
