"""A step: whose rows it carries and how many, and how it is computed."""
