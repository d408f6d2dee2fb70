"""The steps of an embedder."""
