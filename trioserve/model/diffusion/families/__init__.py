"""One module per family: encodes prompts, and calls the network with the inputs of all rows."""
