"""The tasks: each a function from a random state to one exchange."""
