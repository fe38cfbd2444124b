"""A run on storage: its configuration, its artifacts and their manifests."""
