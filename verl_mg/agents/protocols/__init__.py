"""Protocols in which agents write their requests: OpenAI's chat completions and responses, Anthropic's messages."""
