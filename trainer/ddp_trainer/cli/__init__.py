"""The command line: options, the entry point, and two ways to start several processes."""
