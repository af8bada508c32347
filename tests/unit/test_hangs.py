"""Hangs: when a gang hangs with its output as heartbeat, and which rank is the culprit."""

from dataclasses import replace

import pytest
from builders.containers import ended, running, starting
from builders.jobs import a_running_job
from builders.messages import agent_report
from builders.plans import plan_for, written
from builders.pods import an_agents_pod, read_pods
from builders.times import at

from ddpjob.agent import agent, suspicion
from ddpjob.core.api.conditions import find_condition
from ddpjob.core.api.names import ANNOTATION_ASSIGNMENT, Cause, Condition
from ddpjob.core.decide.causes import HANG_SETTLE_TIME
from ddpjob.core.decide.hangs import can_dump
from ddpjob.core.decide.stacks import Frame, find_culprit, lines_of_rank, read_stacks
from ddpjob.core.observe.agent_state import AgentState
from ddpjob.core.observe.observation import observe

BY_LOG = {"hangTimeoutSeconds": 60, "heartbeat": "Log"}
TOLD = {ANNOTATION_ASSIGNMENT: '{"start": true, "dump": true}'}

COMPUTES = ['File "/train.py", line 7 in compute']
WAITS = [
    'File "/venv/torch/distributed/distributed_c10d.py", line 3252 in all_reduce',
    'File "/train.py", line 9 in step',
]


def lines(rank, frames):
    return [f"rank {rank}: {frame}" for frame in frames]


OTHER = ['File "/train.py", line 20 in load']


def hung(index, frames, attempt=0, *, exception="no heartbeat for 61 s", **fields):
    report = agent_report(
        attempt, "Hang", exception=exception, lines=lines(index, frames), **fields
    )
    return an_agents_pod(index, ended(1, report, when=at(-5)))


def a_suspected_gang(*ages, ready=1, silent=300, **surroundings):
    """Return the plan for a gang after all pods but the first `ready` ones have become unready.

    `ages` are the ages of the heartbeats in their agents' answers; None for no answer.
    """
    pods = [
        an_agents_pod(index, running() if index < ready else starting())
        for index in range(len(ages))
    ]
    uids = [pod.uid for pod in read_pods(*pods)]
    answers = {
        uid: AgentState(0, heartbeat=age, watched=True)
        for uid, age in zip(uids, ages, strict=True)
        if age is not None
    }
    job = a_running_job(nodes=len(ages), spec=BY_LOG, silent_since=at(-silent))
    return plan_for(job, *pods, answers=answers, **surroundings)


def told(plan):
    return [assign.name for assign in plan.assign if assign.dump]


# The output of a gang


def test_if_a_pod_stops_to_write_all_agents_are_asked():
    plan = a_suspected_gang(None, None, None, silent=1)
    assert [question.name for question in plan.ask] == ["digits-0-0", "digits-0-1", "digits-0-2"]


def test_while_one_pod_writes_the_gang_does_not_hang():
    # Only rank 0 writes, as in most scripts. The silence of the others has lasted for minutes.
    plan = a_suspected_gang(3.0, 400.0, 400.0)
    assert told(plan) == []
    assert plan.status.attempt.number == 0
    # No event comes when it stops too.
    assert plan.wake_after <= 10
    assert told(a_suspected_gang(59.9, 400.0, 400.0)) == []
    assert told(a_suspected_gang(60.0, 400.0, 400.0)) != []


def test_if_no_pod_has_written_all_write_their_stacks():
    plan = a_suspected_gang(61.0, 400.0, 61.0, ready=0)
    assert told(plan) == ["digits-0-0", "digits-0-1", "digits-0-2"]
    assert (plan.status.attempt.number, plan.delete) == (0, ())


def test_a_gang_that_was_told_has_time_for_its_stacks():
    # The silence of one pod has lasted for minutes, while another one wrote.
    plan = a_suspected_gang(61.0, 400.0, 61.0, ready=0)
    assert plan.status.attempt.silent_since == at(0)
    pods = [an_agents_pod(index, starting(), annotations=TOLD) for index in range(3)]
    job = written(a_running_job(nodes=3, spec=BY_LOG, silent_since=at(-300)), plan)
    for seconds, attempt in ((30, 0), (120, 1)):
        later = plan_for(job, *pods, now=at(seconds))
        assert later.status.attempt.number == attempt


@pytest.mark.parametrize(("refused", "attempt"), [(2, 0), (3, 1)])
def test_a_hung_gang_ends_also_if_the_orders_to_its_pods_are_refused(refused, attempt):
    plan = a_suspected_gang(61.0, 400.0, 61.0, ready=0, refused_orders=refused)
    assert bool(told(plan)) is (attempt == 0)
    assert plan.status.attempt.number == attempt


def test_a_pod_that_does_not_answer_is_not_excused_by_one_that_writes():
    plan = a_suspected_gang(3.0, None, 400.0)
    assert plan.status.last_failure.reason == "Silent"


def test_a_pod_that_never_wrote_is_no_sign_of_life():
    ages = [AgentState(0), AgentState(0, heartbeat=61.0, watched=True)]
    pods = [an_agents_pod(0, running()), an_agents_pod(1, starting())]
    uids = [pod.uid for pod in read_pods(*pods)]
    job = a_running_job(spec=BY_LOG, silent_since=at(-11))
    plan = plan_for(job, *pods, answers=dict(zip(uids, ages, strict=True)))
    assert told(plan) == ["digits-0-0", "digits-0-1"]


@pytest.mark.parametrize(
    "states",
    [
        # No pod has written yet, or one only at its start.
        (AgentState(0), AgentState(0)),
        (AgentState(0, heartbeat=61.0), AgentState(0)),
        (AgentState(0, heartbeat=61.0), AgentState(0, watched=True)),
    ],
)
def test_a_pod_unready_for_another_reason_is_no_hang_before_steady_output(states):
    pods = [an_agents_pod(0, running()), an_agents_pod(1, starting())]
    uids = [pod.uid for pod in read_pods(*pods)]
    job = a_running_job(spec=BY_LOG, silent_since=at(-11))
    plan = plan_for(job, *pods, answers=dict(zip(uids, states, strict=True)))
    assert told(plan) == []
    assert plan.status.attempt.number == 0


def test_without_answers_a_silent_gang_is_judged_as_before():
    plan = a_suspected_gang(None, None, None)
    assert told(plan) == []
    assert (plan.status.attempt.number, plan.status.last_failure.cause) == (1, "Hang")
    assert plan.status.last_failure.reason == "Silent"


def test_with_another_heartbeat_a_silent_gang_is_judged_as_before():
    pods = [an_agents_pod(0, running()), an_agents_pod(1, starting())]
    answers = {pod.uid: AgentState(0, heartbeat=1.0) for pod in read_pods(*pods)}
    job = a_running_job(spec={"hangTimeoutSeconds": 60}, silent_since=at(-300))
    assert plan_for(job, *pods, answers=answers).status.last_failure.reason == "Silent"


def test_with_a_limit_for_the_first_heartbeat_only_any_heartbeat_is_a_sign_of_life():
    pods = [an_agents_pod(0, running()), an_agents_pod(1, starting())]
    uids = [pod.uid for pod in read_pods(*pods)]
    spec = {"firstHeartbeatSeconds": 60, "heartbeat": "Log"}
    both = ["digits-0-0", "digits-0-1"]
    for age, met, names in ((9000.0, -60, []), (None, -59, []), (None, -60, both)):
        job = a_running_job(spec=spec, silent_since=at(-11), running_time=at(met))
        ages = [AgentState(0, heartbeat=age), AgentState(0)]
        plan = plan_for(job, *pods, answers=dict(zip(uids, ages, strict=True)))
        assert told(plan) == names


# The stacks of all ranks


def test_when_one_pod_hangs_the_others_write_their_stacks_first():
    pods = hung(0, WAITS), an_agents_pod(1, running()), an_agents_pod(2, running())
    plan = plan_for(a_running_job(nodes=3), *pods)
    assert told(plan) == ["digits-0-1", "digits-0-2"]
    assert (plan.status.attempt.number, plan.delete) == (0, ())
    # Their agents have the attempt already.
    assert {(assign.grace, assign.start) for assign in plan.assign} == {(0.0, True)}


def test_a_pod_that_has_only_lost_a_peer_tells_nobody_to_write_stacks():
    follower = agent_report(0, "Follower", exception="Connection closed by peer")
    pods = an_agents_pod(0, ended(1, follower, when=at(-5))), an_agents_pod(1, running())
    assert plan_for(a_running_job(), *pods).assign == ()


def test_a_pod_is_told_once():
    pods = hung(0, WAITS), an_agents_pod(1, running(), annotations=TOLD)
    plan = plan_for(a_running_job(undecided_since=at(-5)), *pods)
    assert (plan.assign, plan.status.attempt.number) == ((), 0)


def test_the_operator_waits_longer_for_stacks_than_an_agent_needs():
    needed = suspicion.ORDER_SECONDS + agent.STACK_SECONDS
    assert HANG_SETTLE_TIME.total_seconds() > needed


def test_a_pod_that_does_not_write_its_stacks_is_waited_for_twenty_seconds():
    pods = hung(0, WAITS), an_agents_pod(1, running(), annotations=TOLD)
    assert plan_for(a_running_job(undecided_since=at(-19)), *pods).status.attempt.number == 0
    for seconds in (20, 25):
        status = plan_for(a_running_job(undecided_since=at(-seconds)), *pods).status
        assert (status.attempt.number, status.last_failure.reason) == (1, "Hang")


@pytest.mark.parametrize("agent_of", ["", "ddpjob-agent-0", "ddpjob-agent-z"])
def test_pods_with_an_agent_of_another_version_are_not_waited_for(agent_of):
    other = an_agents_pod(1, running())
    (volume,) = other["spec"]["volumes"]
    volume["configMap"] = {"name": agent_of}
    status = plan_for(a_running_job(), hung(0, WAITS), other).status
    assert status.last_failure.reason == "Hang"


@pytest.mark.parametrize(
    "changes",
    [{"deletion_deadline": at(30)}, {"held": True}, {"attempt": 2}, {"attempt": 4}],
    ids=str,
)
def test_a_pod_can_write_its_stacks_only_if_it_takes_part_in_the_attempt(changes):
    (pod,) = read_pods(an_agents_pod(0, running(), attempt=3))
    obs = observe(a_running_job(attempt=3), [pod])
    assert can_dump(obs, pod)
    assert not can_dump(obs, replace(pod, **changes))


def test_the_rank_that_stands_out_is_named_with_its_stack():
    pods = hung(0, WAITS), hung(1, COMPUTES), hung(2, WAITS)
    failure = plan_for(a_running_job(nodes=3), *pods).status.last_failure
    assert (failure.cause, failure.rank, failure.pod) == (Cause.HANG, 1, "digits-0-1")
    assert failure.message == (
        "pod digits-0-1 hangs: no heartbeat for 61 s; rank 1 stands out, in compute (train.py, "
        "line 7), while rank 0 and 1 more are in step (train.py, line 9); "
        'rank 1: File "/train.py", line 7 in compute'
    )


def test_the_message_has_the_longest_time_without_a_heartbeat():
    told_to_end = agent_report(
        0, "Hang", exception="no heartbeat for 2 s", lines=lines(1, COMPUTES)
    )
    pods = hung(0, WAITS), an_agents_pod(1, ended(1, told_to_end, when=at(-5))), hung(2, WAITS)
    message = plan_for(a_running_job(nodes=3), *pods).status.last_failure.message
    assert message.startswith("pod digits-0-1 hangs: no heartbeat for 61 s; rank 1 stands out")
    # Before the first heartbeat, there is no age.
    pods = (
        hung(0, WAITS, exception="no heartbeat"),
        hung(1, WAITS, exception="no heartbeat for 0 s"),
    )
    message = plan_for(a_running_job(), *pods).status.last_failure.message
    assert message.startswith("pod digits-0-0 hangs: no heartbeat for 0 s")


def test_of_two_ranks_that_stand_out_the_first_one_is_named():
    pods = [hung(0, WAITS), hung(1, COMPUTES), hung(2, COMPUTES), hung(3, WAITS), hung(4, WAITS)]
    failure = plan_for(a_running_job(nodes=5), *pods).status.last_failure
    assert (failure.rank, failure.pod) == (1, "digits-0-1")


def test_of_two_ranks_the_one_in_the_lower_step_is_named():
    pods = hung(0, OTHER, steps={"0": [0, 7]}), hung(1, COMPUTES, steps={"0": [0, 6]})
    assert plan_for(a_running_job(), *pods).status.last_failure.rank == 1
    pods = hung(0, OTHER, steps={"0": [0, 5]}), hung(1, COMPUTES, steps={"0": [0, 6]})
    assert plan_for(a_running_job(), *pods).status.last_failure.rank == 0


def test_a_pod_without_a_hang_is_not_named_for_it():
    follower = agent_report(0, "Follower", exception="Connection closed by peer")
    pods = an_agents_pod(0, ended(1, follower, when=at(-5))), hung(1, WAITS)
    failure = plan_for(a_running_job(), *pods).status.last_failure
    told_by_rank = "; ".join(lines(1, WAITS))
    message = f"pod digits-0-1 hangs: no heartbeat for 61 s; {told_by_rank}"
    assert (failure.pod, failure.message) == ("digits-0-1", message)


def test_if_no_rank_stands_out_the_message_says_so():
    failure = plan_for(a_running_job(), hung(0, WAITS), hung(1, WAITS)).status.last_failure
    assert "no heartbeat for 61 s; no rank stands out; rank 0: File" in failure.message
    assert (failure.rank, failure.pod) == (None, "digits-0-0")


# Which rank stands out


def stacks(*frames):
    return read_stacks(
        "\n".join(line for rank, each in enumerate(frames) for line in lines(rank, each))
    )


@pytest.mark.parametrize(
    ("found", "steps", "ranks"),
    [
        (stacks(WAITS, COMPUTES, WAITS), {}, (1,)),
        (stacks(COMPUTES, COMPUTES, WAITS), {}, (2,)),
        # Of two ranks, the one that waits for nobody.
        (stacks(WAITS, COMPUTES), {}, (1,)),
        (stacks(COMPUTES, WAITS), {}, (0,)),
        # Both wait, or neither: the one in the lower step.
        (stacks(COMPUTES, OTHER), {0: 7, 1: 6}, (1,)),
        (stacks(COMPUTES, OTHER), {0: 7}, (0,)),
        (stacks(COMPUTES, OTHER), {}, None),
        (stacks(COMPUTES, OTHER), {0: 7, 1: 7}, None),
        (stacks(WAITS, WAITS, WAITS), {0: 1, 1: 2}, None),
        (stacks(COMPUTES), {}, None),
        ({}, {}, None),
        # A rank hanging in the kernel shows no stack.
        (stacks(WAITS, ["no stack"], WAITS), {}, (1,)),
        # Frames of torch do not tell ranks apart.
        (stacks([WAITS[0], *COMPUTES], COMPUTES), {}, None),
    ],
)
def test_the_smallest_group_of_equal_stacks_stands_out(found, steps, ranks):
    culprit = find_culprit(found, steps)
    assert (culprit.ranks if culprit else None) == ranks


@pytest.mark.parametrize(
    "text", ["", "rank x: no stack", 'rank x: File "a", line 1 in b', "\x00" * 99]
)
def test_what_is_no_stack_is_left_out(text):
    assert read_stacks(text) == {}
    found = read_stacks(f'{text}\nrank 3: File "/a.py", line 4 in f')
    assert found == {3: [Frame("/a.py", "4", "f")]}


# Whether hangs are detected


def checked(*ages, seconds=700, **fields):
    """Return the plan for a gang after so many seconds, with these ages in its agents' answers."""
    pods = [an_agents_pod(index, running()) for index in range(len(ages))]
    uids = [pod.uid for pod in read_pods(*pods)]
    answers = {
        uid: AgentState(0, heartbeat=age, watched=age is not None)
        for uid, age in zip(uids, ages, strict=True)
        if age != "no answer"
    }
    spec = {"hangTimeoutSeconds": 90, **fields}
    job = a_running_job(nodes=len(ages), spec=spec, running_time=at(-seconds))
    return plan_for(job, *pods, answers=answers)


def hangs_detected(plan):
    found = find_condition(plan.status.conditions, Condition.HANGS_DETECTED)
    return (found.status, found.reason) if found else None


def test_after_the_time_of_the_limit_the_agents_are_asked_for_heartbeats():
    assert checked("no answer", "no answer", seconds=599).ask == ()
    plan = checked("no answer", "no answer")
    assert [question.name for question in plan.ask] == ["digits-0-0", "digits-0-1"]
    assert hangs_detected(plan) is None
    # A pod must have had the time to write in three limits.
    by_log = {"heartbeat": "Log", "hangTimeoutSeconds": 300}
    assert checked("no answer", "no answer", seconds=1199, **by_log).ask == ()
    assert len(checked("no answer", "no answer", seconds=1200, **by_log).ask) == 2


def test_a_pod_without_heartbeats_is_named_in_an_event_and_a_condition():
    plan = checked(3.0, None)
    assert hangs_detected(plan) == ("False", "NoHeartbeat")
    (event,) = plan.events
    assert (event.kind, event.reason) == ("Warning", "NoHeartbeat")
    assert event.message == (
        "digits-0-1 has never touched $DDP_HEARTBEAT_FILE, so hangs are not detected there; touch "
        "it at each step, or use heartbeat: Log in a new job"
    )
    assert "digits-0-0 and 1 more have never" in checked(None, None).events[0].message


def test_with_heartbeats_by_output_one_pod_that_writes_is_enough():
    assert hangs_detected(checked(3.0, None, heartbeat="Log")) == ("True", "HeartbeatsSeen")
    plan = checked(None, None, heartbeat="Log")
    assert hangs_detected(plan) == ("False", "NoHeartbeat")
    assert plan.events[0].message == (
        "no pod has written in three times of hangTimeoutSeconds, so hangs are not detected; write "
        "a line at each step, or choose a longer time in a new job"
    )


def test_heartbeats_are_asked_for_once():
    plan = checked(3.0, 0.0)
    assert (hangs_detected(plan), plan.events) == (("True", "HeartbeatsSeen"), ())
    job = written(a_running_job(spec={"hangTimeoutSeconds": 90}, running_time=at(-700)), plan)
    later = plan_for(job, an_agents_pod(0, running()), an_agents_pod(1, running()))
    assert (later.ask, later.events) == ((), ())


def test_with_heartbeats_by_file_the_silent_pod_is_asked_and_all_write_their_stacks():
    pods = [an_agents_pod(0, running()), an_agents_pod(1, starting())]
    job = a_running_job(spec={"hangTimeoutSeconds": 60}, silent_since=at(-1))
    plan = plan_for(job, *pods)
    assert ([question.name for question in plan.ask], told(plan)) == (["digits-0-1"], [])
    (_, silent) = read_pods(*pods)
    plan = plan_for(job, *pods, answers={silent.uid: AgentState(0, heartbeat=59.0)})
    assert told(plan) == []
    for age in (60.0, 61.0):
        plan = plan_for(job, *pods, answers={silent.uid: AgentState(0, heartbeat=age)})
        assert told(plan) == ["digits-0-0", "digits-0-1"]


def test_ranks_with_equal_stacks_share_their_lines():
    """A pod of a Trn1 instance has 32 ranks, and a report has a dozen lines."""
    text = """ranks 4-5,9: File "/train.py", line 3 in compute
ranks 0-3,6-8,10-31: File "/torch/distributed/c10d.py", line 9 in all_reduce
ranks 0-3,6-8,10-31: File "/train.py", line 7 in step"""
    stacks = read_stacks(text)
    assert len(stacks) == 32
    assert stacks[5] == [Frame("/train.py", "3", "compute")]
    assert find_culprit(stacks, {}).message == (
        "rank 4 and 2 more stand out, in compute (train.py, line 3), "
        "while rank 0 and 28 more are in step (train.py, line 7)"
    )
    assert lines_of_rank(9, text.splitlines()) == text.splitlines()[:1]


@pytest.mark.parametrize("ranks", ["0-999999999", "5-1", "-", "1--2", "9" * 40, "7,7,7"])
def test_a_forged_range_of_ranks_costs_little(ranks):
    line = f'ranks {ranks}: File "/train.py", line 3 in compute'
    stacks = read_stacks("\n".join([line] * 100))
    assert sum(map(len, stacks.values())) <= 4096
    assert all(rank < 2**31 for rank in stacks)
