"""The connector that keeps what leaves the prefix cache: in host memory, and on request in a directory."""
