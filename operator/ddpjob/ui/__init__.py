"""Jobs in a browser: read-only pages on 127.0.0.1 over a cluster or over the runs of this machine.

A page is complete without JavaScript. `static/live.js` loads it again every few seconds.

May import `core`, `jobs`, `show` and `client`.
"""
