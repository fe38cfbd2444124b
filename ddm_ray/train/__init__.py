"""One training job for expert, router and monolith: objective, model and rows differ, nothing else."""
