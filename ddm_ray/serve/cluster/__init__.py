"""Deployments of Ray Serve, the gateway before them, and calls between their processes."""
