"""Formats of tool calls, one per module: a script that reads calls, and a CallFormat that writes and forces them."""
