"""llama-server's own surface, where it is not OpenAI's."""
