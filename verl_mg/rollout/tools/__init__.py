"""Multi-turn generation with tools, around any engine.

tool          a Python function as a tool: schema, arguments, time limit
builtin       tools that a configuration can name
chat_format   parses tool calls from tokens, and formats results as tokens
multi_turn    engine whose samples call tools between their turns
"""
