"""How models write calls of tools: a file for each way, which reads it, writes it, and says how it is forced."""
