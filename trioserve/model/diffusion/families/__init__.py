"""One file for each family: how its texts are encoded, and what its network is told of a row."""
