"""What a run needs before it starts: feasibility, memory, step time, layout search and the dry run's report."""
