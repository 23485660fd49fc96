"""Modules of the image model families. Each encodes prompts, and calls the network with the inputs of all rows."""
