"""Holding requests back that have not begun, while those that have are finished: what a swap of the weights needs."""

from helpers.fake_runner import FakeRunner, expected_output, make_request, make_scheduler, run


def step(scheduler, runner):
    plan = scheduler.schedule()
    deltas = scheduler.apply(plan, runner.step(plan))
    scheduler.check_integrity()
    return plan, deltas


def test_only_what_has_begun_is_run_and_the_rest_follows_when_it_may():
    scheduler = make_scheduler(max_num_seqs=2)
    runner = FakeRunner(scheduler._layout)
    requests = [make_request(str(i), [i] * 5, max_tokens=4) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    step(scheduler, runner)
    assert scheduler.has_begun and scheduler.num_running == 2
    scheduler.admits_new = False
    got = {}
    while scheduler.has_begun:
        for delta in step(scheduler, runner)[1]:
            got.setdefault(delta.request_id, []).extend(delta.new_token_ids)
    assert set(got) == {"0", "1"} and scheduler.num_waiting == 2
    assert not step(scheduler, runner)[0].scheduled
    scheduler.set_namespace(b"new")
    scheduler.admits_new = True
    rest = run(scheduler, runner)
    assert {name: out.token_ids for name, out in rest.items()} == {
        request.request_id: expected_output(request)[0] for request in requests[2:]
    }


def test_a_preempted_request_has_begun():
    scheduler = make_scheduler()
    runner = FakeRunner(scheduler._layout)
    for name in ("a", "b"):
        scheduler.add(make_request(name, [ord(name)] * 5, max_tokens=4))
    step(scheduler, runner)
    scheduler.add(make_request("late", [9] * 5, max_tokens=4))
    scheduler.admits_new = False
    scheduler._preempt(scheduler.get("b"))
    scheduler._preempt(scheduler.get("a"))
    assert scheduler.has_begun and scheduler.num_running == 0
    while scheduler.has_begun:
        step(scheduler, runner)
    assert scheduler.num_waiting == 1 and scheduler.get("late") is not None
