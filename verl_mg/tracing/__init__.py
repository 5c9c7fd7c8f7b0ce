"""Sharding tables read from the weight loaders of engines, by loading codes of positions instead of weights."""
