"""Multi-turn generation with tools, around any engine.

tool, class_tools, mcp_tools   functions, the methods of a class, and servers as tools
tool_state, tool_runner        the states that tools have for a sample, and its calls
multi_turn, chat_format        engine whose samples call tools; calls and results as tokens
"""
