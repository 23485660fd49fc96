"""Formats of tool calls. Each module has a script that reads calls, and a CallFormat that writes and forces calls."""
