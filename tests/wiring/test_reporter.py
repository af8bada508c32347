"""Events about obstacles: one for each, and again before the API server removes it."""

import pytest
from gang import a_job

from ddpjob.controller.events import REPEAT_AFTER, Reporter
from ddpjob.core.api.job import Job
from ddpjob.kube.errors import ApiError


class Writer:
    """Keeps the messages of the events, unless it has an error to raise."""

    def __init__(self):
        self.messages = []
        self.error = None

    async def write(self, request):
        if self.error:
            raise self.error
        self.messages.append(request.body["message"])
        return {}


class Clock:
    """Monotonic seconds, set by a test."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def reporter():
    return Reporter(Writer(), "operator", Clock())


@pytest.fixture
def job():
    body = a_job()
    body["metadata"] |= {"uid": "uid", "resourceVersion": "1"}
    return Job.from_dict(body)


async def test_an_obstacle_is_posted_once_in_the_lifetime_of_an_event(reporter, job):
    for _ in range(3):
        await reporter.post_once(job, "NotServed", "excluded")
        reporter.clock.now += REPEAT_AFTER / 3
    assert reporter.writer.messages == ["excluded"]
    await reporter.post_once(job, "NotServed", "excluded")
    assert reporter.writer.messages == ["excluded"] * 2
    # By default, an API server removes an event after an hour.
    assert REPEAT_AFTER < 3600


async def test_another_obstacle_is_posted_at_once(reporter, job):
    await reporter.post_once(job, "NotServed", "one")
    await reporter.post_once(job, "NotServed", "two")
    assert reporter.writer.messages == ["one", "two"]


async def test_an_obstacle_with_another_message_is_the_same_one(reporter, job):
    await reporter.post_once(job, "NotServed", "until 12:00", "other/operator")
    await reporter.post_once(job, "NotServed", "until 12:01", "other/operator")
    assert reporter.writer.messages == ["until 12:00"]


async def test_obstacles_of_two_reasons_do_not_replace_each_other(reporter, job):
    for _ in range(2):
        await reporter.post_once(job, "NoAgent", "one")
        await reporter.post_once(job, "AssignRefused", "two")
    assert reporter.writer.messages == ["one", "two"]


async def test_an_obstacle_that_comes_back_is_posted_at_once(reporter, job):
    await reporter.post_once(job, "NotServed", "one")
    reporter.forget("uid", "NotServed")
    await reporter.post_once(job, "NotServed", "one")
    reporter.forget_others({"uid"})
    await reporter.post_once(job, "NotServed", "one")
    reporter.forget_others(set())
    await reporter.post_once(job, "NotServed", "one")
    assert reporter.writer.messages == ["one"] * 3


async def test_an_event_that_was_not_posted_is_tried_again(reporter, job):
    reporter.writer.error = ApiError(500, "InternalError", "no")
    await reporter.post_once(job, "NotServed", "one")
    reporter.writer.error = None
    await reporter.post_once(job, "NotServed", "one")
    assert reporter.writer.messages == ["one"]
