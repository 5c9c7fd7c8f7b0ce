"""Every sample of a run in Parquet, with all that a recipe made of it; written, and read for a replay."""
