"""Ranks of a job: rendezvous, collectives, watchdog and signals."""
