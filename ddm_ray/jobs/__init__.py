"""Training jobs on storage: attempts and their leases, launches, requests to stop, and what observers see."""
