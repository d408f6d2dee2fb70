"""Measurements of the server and its parts, each against its ceiling."""
