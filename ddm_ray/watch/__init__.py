"""Watching a run from any machine that can read it: a live view, events, a webhook, gauges. No torch, no Ray."""
