"""What the package promises about time and memory, measured: `python -m benchmarks`."""
