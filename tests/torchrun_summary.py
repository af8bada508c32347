"""What torchrun logs about the rank that failed first."""

SUMMARY = """[rank1]: ValueError: boom
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_12:00:00
  host      : localhost
  rank      : 1 (local_rank: 0)
  exitcode  : 1 (pid: 42)
  error_file: <N/A>
"""
