"""Observability: metrics, trackers, status, profiles, timelines and recorded samples."""
