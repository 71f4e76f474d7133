"""One file for each command: `HELP`, `arguments(parser)` and `run(args)`, which imports what is heavy."""
