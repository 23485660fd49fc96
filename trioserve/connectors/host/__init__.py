"""Connector that keeps evicted blocks of the prefix cache in host memory, and optionally in a directory."""
