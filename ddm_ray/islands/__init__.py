"""Islands: Ray clusters that share nothing but storage, share out a run's jobs, and are started from afar."""
