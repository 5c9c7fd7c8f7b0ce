"""Sharding tables read from SGLang's weight loaders, by loading codes of positions instead of weights."""
