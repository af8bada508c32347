"""The user's own files as the code of a job. May import `core.api`.

These modules read files. They know neither clusters nor jobs.
"""
