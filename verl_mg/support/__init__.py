"""What works with a model: backends, parallel sizes, engines, adapters; the answers are those of the code of jobs."""
