"""A page in the browser over the folder of a run: curves, time lines of ranks, samples token by token."""
