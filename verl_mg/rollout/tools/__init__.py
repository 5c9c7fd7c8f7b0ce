"""Multi-turn generation with tools, around any engine.

tool          a function as a tool: schema, arguments, time limit
class_tools   the methods of a class as tools, with an object for each sample
mcp_tools     the tools of MCP servers
load          loads the tools that a configuration names
builtin       tools that a configuration can name
tool_state    opens and closes the state that tools have for a sample
tool_runner   runs the calls of the samples of an engine
chat_format   parses tool calls from tokens, and formats results as tokens
multi_turn    engine whose samples call tools between their turns
"""
