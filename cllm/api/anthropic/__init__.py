"""Anthropic's surface."""
