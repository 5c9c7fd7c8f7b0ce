"""Reports of what works with a model: backends, parallel sizes, engines, adapters, as the code of jobs decides it."""
