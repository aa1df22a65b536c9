"""Saving, resuming and exporting: files on disk, a role's state in them, the ranks' agreement, Hugging Face folders."""
