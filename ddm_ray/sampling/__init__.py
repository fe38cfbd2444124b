"""From noise to images: trajectories that say what to evaluate, and drivers that evaluate it."""
