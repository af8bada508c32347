"""The objects to create for a job: pods, the Service and the ConfigMap of the agent.

`objects` has the entrance. The skeletons are in `templates/`. May import `core.api`,
`core.observe`, `core.plan` and `core.agent_files`.
"""
