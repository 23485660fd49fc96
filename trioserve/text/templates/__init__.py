"""Chat templates: rendering within bounds of time and memory, and what a template supports."""
