"""Watching a run from anywhere that can read it: a live view, events, a webhook, gauges. Without torch and Ray."""
