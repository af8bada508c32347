"""What people see of jobs: progress, tables and curves, in a terminal and as pictures.

May import `core` and `jobs`.
"""
