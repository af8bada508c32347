"""The rules: the Plan for a job, given its Observation and the time.

`rules` has the entrance, `decide`. May import `core.api`, `core.observe`, `core.plan` and
`core.agent_files`.
"""
