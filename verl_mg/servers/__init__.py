"""SGLang servers by URL: their requests, health, keys and pool."""
