"""The training loop of a job: start, checkpoint and resume, replay, the run directory."""
