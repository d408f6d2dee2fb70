"""Puts load on a server over HTTP and measures what its clients see. Pure client code: it knows nothing of the engine."""
