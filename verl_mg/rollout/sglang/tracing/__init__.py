"""Derives the sharding table of an architecture from SGLang's own weight loaders."""
