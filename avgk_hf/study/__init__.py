"""Several trainings at once: seeds, searches and comparisons, their tables and their pictures."""
