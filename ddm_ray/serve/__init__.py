"""The mixture behind HTTP: one Ray Serve deployment per expert, one router, one ingress."""
