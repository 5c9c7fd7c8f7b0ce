"""Multi-turn generation with tools, around any engine.

tool, load, mcp_tools     functions, the methods of a class, and servers as tools
tool_runner               the calls of a sample, and the states that its tools have
multi_turn, chat_format   engine whose samples call tools; calls and results as tokens
"""
