"""Ollama's surface."""
