"""The commands: a module for each, with its options and its work.

The function `command` of a module has the options as its parameters and the help as its docstring.
A module is imported when its command is used, so it imports at its beginning only what `--help` may
wait for. The client of a cluster and packages of extras are imported where they are used.

May import `core`, `jobs`, `convert`, `show`, `local`, `client`, `ui`, `controller` and `cli`.
"""
