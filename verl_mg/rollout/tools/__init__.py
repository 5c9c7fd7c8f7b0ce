"""Turns with tools around any engine.

tool        a Python function as a tool: its schema, its arguments, its time-out
ready       tools to name in a configuration
dialogue    what the policy wrote to calls, results to tokens that it reads
turns       an engine whose samples call tools between their turns
"""
