"""How the next token is drawn: one sequence's parameters, the ways to draw, and logprobs."""
