-- The health of a DDPJob for Argo CD, by its phase and the reason for it.

-- The job cannot go on until a person has changed something.
local needs_a_person = {
  ClaimNotFound = true,
  Forbidden = true,
  GangUnavailable = true,
  HeldByKueue = true,
  ImagePull = true,
  InvalidPod = true,
  InvalidSpec = true,
  PodSecurity = true,
  QueueUnavailable = true,
}
local of_phase = {
  Complete = "Healthy",
  Failed = "Degraded",
  Running = "Healthy",
  Suspended = "Suspended",
}

local status = obj.status or {}
if status.phase == nil or status.observedGeneration ~= obj.metadata.generation then
  return { status = "Progressing", message = "the operator has not seen the job yet" }
end

-- A job without a place in its queue has no pods, like one that is suspended.
local waits = status.reason == "Queued"
for _, condition in ipairs(status.conditions or {}) do
  if condition.type == "Suspended" and condition.status == "True" then
    waits = true
  end
end

local health = of_phase[status.phase] or "Progressing"
local finished = status.phase == "Complete" or status.phase == "Failed"
if not finished and needs_a_person[status.reason] then
  health = "Degraded"
elseif not finished and waits then
  health = "Suspended"
end
return { status = health, message = (status.reason or "") .. ": " .. (status.message or "") }
