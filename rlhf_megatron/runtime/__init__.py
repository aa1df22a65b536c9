"""What keeps a run alive: checkpoints on disk. What goes into them is the matter of the roles and the loops."""
