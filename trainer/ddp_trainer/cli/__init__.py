"""The command line: flags, options, the entry point, and the two launchers."""
