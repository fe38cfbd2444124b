"""What a finished run is worth: distances, losses, costs, pictures, and the report."""
