"""The training loops, each readable from top to bottom, and what they share."""
