"""Processes of a job: rendezvous, collectives of small messages, watchdog and signals."""
