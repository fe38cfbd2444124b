"""The run on storage: objects, manifests, attempts, and the layout that ties them. No torch, no ray."""
