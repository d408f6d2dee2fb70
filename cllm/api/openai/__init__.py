"""The surface that clients written for OpenAI use."""
