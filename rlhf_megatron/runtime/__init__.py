"""Runtime services that keep a run alive: watchdog, signals, recovery, health and faults."""
