"""Makes the embedded demo model; README.md says how."""
