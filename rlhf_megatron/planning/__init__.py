"""Plans of a run before it starts: feasibility, memory, step time, layout search and the dry run's report."""
