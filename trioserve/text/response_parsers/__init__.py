"""What a model wrote, to the parts of a response: a file for each way of writing calls or thoughts."""
