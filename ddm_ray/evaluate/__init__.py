"""Evaluation of a finished run: distances, losses, costs, pictures, and the report."""
