"""Watching a run from anywhere that sees its storage: events, a webhook, gauges. No torch, no ray, no part in it."""
