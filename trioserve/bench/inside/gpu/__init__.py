"""Measures this program on a GPU, in parts with time limits of their own. See command.py."""
