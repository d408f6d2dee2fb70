"""Slots, cells, what is kept of what ended, and what goes to the host and comes back."""
