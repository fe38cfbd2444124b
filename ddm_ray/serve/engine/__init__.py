"""Batches, schedules and segments of requests on networks: no HTTP, no Ray."""
