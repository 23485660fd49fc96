"""Parsers that split a model's text into the parts of a response, for all formats of calls and reasoning."""
