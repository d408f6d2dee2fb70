"""Who waits, who may join, whose turn it is, and who is let in by itself."""
