"""What `python -m benchmarks report` writes, a module for each part."""
