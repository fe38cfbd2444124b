"""Ray around training: launches, workers, recovery."""
