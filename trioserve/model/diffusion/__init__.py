"""Models that make pictures in many small steps: what diffusers' components compute, for requests at any steps."""
