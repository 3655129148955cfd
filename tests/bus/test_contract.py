"""What `bus.port` promises, asked of both adapters alike: a simulation in memory proves nothing if they differ."""

import asyncio

import pytest

from bus.port import Bus, Fenced
from bus.table import (
    BATCHES,
    CONTROL,
    DEAD,
    DROPPED,
    LEASES,
    PARTIALS,
    PROMPTS,
    REWARD_WORKERS,
    ROLLOUT_WORKERS,
    ROLLOUTS,
    TURNS,
)
from schemas import Control, Dropped, Turn
from tests.bus.samples import ACK_WAIT_S, WAIT_S, NewClient, fetch_until, groups, partial, prompt, take

UNHURRIED = pytest.mark.parametrize("ack_wait_s", [60.0])  # nothing comes again within the test by itself


async def test_a_message_comes_back_as_it_was_stored(bus: Bus) -> None:
    ack = await bus.publish(prompt(12, 3))
    assert (ack.seq, ack.duplicate) == (1, False)
    entry = (await bus.get(PROMPTS, [1]))[0]
    assert entry.message() == prompt(12, 3)
    assert (entry.stream, entry.seq, entry.key, entry.id) == (PROMPTS, 1, "", "12-3")
    assert entry.sample == (12, 3)
    assert entry.versions == (4, 4)
    assert entry.headers["Rs-Run"] == bus.run


async def test_every_way_of_reading_gives_the_same_entry(bus: Bus) -> None:
    """A reader that resumes by another way must not see another message."""
    await bus.publish(partial(1, 5))
    [got] = await bus.get(PARTIALS, [1])
    [read] = await take(bus.read(PARTIALS), 1)
    last = await bus.last(PARTIALS, "1-0")
    assert last is not None
    assert got.key == read.key == last.key == "1-0"
    assert dict(got.headers) == dict(read.headers) == dict(last.headers)
    assert got.data == read.data == last.data
    assert got.time_s == pytest.approx(read.time_s, abs=1e-3)
    assert got.time_s == pytest.approx(last.time_s, abs=1e-3)


async def test_an_id_is_stored_once(bus: Bus) -> None:
    """Retries after a lost acknowledgement write the same id again."""
    first = await bus.publish(prompt(1))
    await bus.publish(prompt(2))
    again = await bus.publish(prompt(1))
    assert (again.seq, again.duplicate) == (first.seq, True)
    assert (await bus.info(PROMPTS)).messages == 2


async def test_concurrent_publishes_are_all_stored(bus: Bus) -> None:
    acks = await asyncio.gather(*(bus.publish(prompt(group)) for group in range(500)))
    assert sorted(ack.seq for ack in acks) == list(range(1, 501))


async def test_setup_again_changes_nothing(bus: Bus, new_client: NewClient) -> None:
    await bus.publish(prompt(1))
    other = await new_client()
    await other.setup()
    assert await other.exists()
    assert (await other.info(PROMPTS)).messages == 1


async def test_fenced_messages_stand_in_order_after_the_last(bus: Bus) -> None:
    last = await bus.publish_fenced([prompt(group) for group in range(100)], 0)
    assert last == 100
    assert await bus.publish_fenced([prompt(100)], last) == 101
    entries = await bus.get(PROMPTS, range(1, 102))
    assert [entry.sample for entry in entries] == [(group, 0) for group in range(101)]


async def test_fenced_messages_that_stand_already_count_as_stored(bus: Bus) -> None:
    """The writer died before it saw the acknowledgement; its successor writes the same again, and one more."""
    await bus.publish_fenced([prompt(0), prompt(1)], 0)
    assert await bus.publish_fenced([prompt(0), prompt(1), prompt(2)], 0) == 3
    assert (await bus.info(PROMPTS)).messages == 3


async def test_the_second_of_two_writers_is_fenced(bus: Bus, new_client: NewClient) -> None:
    """Two controllers that both believe to be active must not both admit."""
    other = await new_client()
    await bus.publish_fenced([prompt(0)], 0)
    await other.publish_fenced([prompt(1), prompt(2)], 1)
    with pytest.raises(Fenced):
        await bus.publish_fenced([prompt(3), prompt(4)], 1)
    assert [entry.sample for entry in await bus.get(PROMPTS, [1, 2, 3])] == [(0, 0), (1, 0), (2, 0)]
    assert (await bus.info(PROMPTS)).messages == 3


async def test_a_writer_that_decides_alike_is_fenced_too(bus: Bus, new_client: NewClient) -> None:
    """A controller that slept wakes up and admits the very group that its successor admitted: the same ids."""
    other = await new_client()
    await bus.publish_fenced([prompt(0)], 0)
    await other.publish_fenced([prompt(1), prompt(2)], 1)
    with pytest.raises(Fenced):
        await bus.publish_fenced([prompt(1), prompt(2)], 1)
    with pytest.raises(Fenced):
        await bus.publish_fenced([prompt(1), prompt(2), prompt(3)], 1)
    assert (await bus.info(PROMPTS)).last_seq == 3


async def test_a_fenced_message_that_stands_elsewhere_is_no_success(bus: Bus) -> None:
    """The broker calls it a duplicate and stores nothing at the expected place."""
    await bus.publish_fenced([prompt(0), prompt(1)], 0)
    with pytest.raises(Fenced):
        await bus.publish_fenced([prompt(0)], 2)


async def test_a_fenced_writer_ahead_of_the_log_is_refused(bus: Bus) -> None:
    with pytest.raises(Fenced):
        await bus.publish_fenced([prompt(0)], 5)


async def test_a_message_goes_to_one_worker(bus: Bus, new_client: NewClient) -> None:
    other = await new_client()
    for group in range(10):
        await bus.publish(prompt(group))
    async with bus.subscribe(ROLLOUT_WORKERS) as mine, other.subscribe(ROLLOUT_WORKERS) as theirs:
        first = await mine.fetch(5, WAIT_S)
        second = await theirs.fetch(5, WAIT_S)
        seen = groups(first) + groups(second)
        assert sorted(set(seen)) == sorted(seen)
        assert len(first) <= 5
        assert len(second) <= 5


async def test_a_fetch_is_never_given_more_than_it_asked_for(bus: Bus) -> None:
    """A worker takes what it has room for; the rest is for others, and not withheld from them."""
    for group in range(20):
        await bus.publish(prompt(group))
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        held = 0
        for most in (7, 3, 1, 5):
            held += len(await subscription.fetch(most, WAIT_S))
            await asyncio.sleep(0.02)
            backlog = await bus.backlog(ROLLOUT_WORKERS)
            assert backlog.ack_pending <= 7 + 3 + 1 + 5
        assert held <= 16


@UNHURRIED
async def test_a_smaller_fetch_takes_back_what_a_larger_one_had_asked_for(bus: Bus, new_client: NewClient) -> None:
    """A worker that has filled up must not be handed a message that another could start at once."""
    other = await new_client()
    async with bus.subscribe(ROLLOUT_WORKERS) as full, other.subscribe(ROLLOUT_WORKERS) as free:
        assert await full.fetch(10, 0.05) == []
        assert await full.fetch(1, 0.05) == []
        for group in range(4):
            await bus.publish(prompt(group))
        got = await fetch_until(free, 3)
        assert len(got) >= 3
        assert len(await full.fetch(1, 0.3)) == 4 - len(got)


@UNHURRIED
async def test_a_fetch_of_none_takes_back_all_that_was_asked_for(bus: Bus, new_client: NewClient) -> None:
    other = await new_client()
    async with bus.subscribe(ROLLOUT_WORKERS) as full, other.subscribe(ROLLOUT_WORKERS) as free:
        assert await full.fetch(10, 0.05) == []
        assert await full.fetch(0, 0.0) == []
        for group in range(4):
            await bus.publish(prompt(group))
        assert len(await fetch_until(free, 4)) == 4
        assert len(await full.fetch(1, 0.1)) == 0


async def test_an_empty_fetch_waits_no_longer_than_it_was_told(bus: Bus) -> None:
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        began_s = asyncio.get_running_loop().time()
        assert await subscription.fetch(5, 0.1) == []
        assert 0.09 <= asyncio.get_running_loop().time() - began_s < 2.0


@UNHURRIED
async def test_a_waiting_fetch_is_woken_by_a_message(bus: Bus) -> None:
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        waiting = asyncio.create_task(subscription.fetch(5, WAIT_S))
        await asyncio.sleep(0.05)
        await bus.publish(prompt(1))
        async with asyncio.timeout(1.2):  # less than its own look around
            assert groups(await waiting) == [1]


async def test_an_acknowledged_message_never_comes_again(bus: Bus) -> None:
    await bus.publish(prompt(1))
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        [delivery] = await subscription.fetch(5, WAIT_S)
        await delivery.ack()
        assert await subscription.fetch(5, 2 * ACK_WAIT_S) == []
    assert (await bus.backlog(ROLLOUT_WORKERS)).ack_pending == 0


async def test_a_message_of_a_silent_worker_comes_again(bus: Bus) -> None:
    await bus.publish(prompt(1))
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        [first] = await subscription.fetch(5, WAIT_S)
        began_s = asyncio.get_running_loop().time()
        [again] = await subscription.fetch(5, WAIT_S)
        assert asyncio.get_running_loop().time() - began_s >= 0.8 * ACK_WAIT_S
        assert (first.deliveries, again.deliveries) == (1, 2)
        assert again.entry.seq == first.entry.seq


@pytest.mark.parametrize("ack_wait_s", [2.0])
async def test_progress_keeps_a_message(bus: Bus, ack_wait_s: float) -> None:
    """A long answer takes minutes; its prompt must not be started twice."""
    await bus.publish(prompt(1))
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        [delivery] = await subscription.fetch(5, WAIT_S)
        for _ in range(3):
            assert await subscription.fetch(5, 0.4 * ack_wait_s) == []
            await delivery.in_progress()
        await delivery.ack()


@UNHURRIED
async def test_a_message_given_back_comes_at_once(bus: Bus) -> None:
    await bus.publish(prompt(1))
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        [delivery] = await subscription.fetch(5, WAIT_S)
        await delivery.nak()
        [again] = await subscription.fetch(5, WAIT_S)
        assert again.deliveries == 2


@UNHURRIED
async def test_a_message_given_back_for_later_comes_later(bus: Bus) -> None:
    await bus.publish(prompt(1))
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        [delivery] = await subscription.fetch(5, WAIT_S)
        began_s = asyncio.get_running_loop().time()
        await delivery.nak(delay_s=0.3)
        [_] = await subscription.fetch(5, WAIT_S)
        assert asyncio.get_running_loop().time() - began_s >= 0.25


async def test_a_terminated_message_never_comes_again(bus: Bus) -> None:
    await bus.publish(prompt(1))
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        [delivery] = await subscription.fetch(5, WAIT_S)
        await delivery.term()
        assert await subscription.fetch(5, 2 * ACK_WAIT_S) == []


@UNHURRIED
async def test_a_subscription_that_ends_withholds_nothing(bus: Bus, new_client: NewClient) -> None:
    """What it had asked for and not returned is free for others at once, not after the ack wait."""
    other = await new_client()
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        assert await subscription.fetch(10, 0.05) == []  # leaves ten asked for
        await asyncio.gather(*(bus.publish(prompt(group)) for group in range(3)))
    async with other.subscribe(ROLLOUT_WORKERS) as subscription:
        got = await fetch_until(subscription, 3)
        assert sorted(groups(got)) == [0, 1, 2]


async def test_a_reader_sees_all_from_its_start_and_then_what_comes(bus: Bus) -> None:
    for group in range(600):  # more than one window
        await bus.publish(prompt(group))
    entries = bus.read(PROMPTS, 3)
    assert [entry.seq for entry in await take(entries, 598)] == list(range(3, 601))
    tail = asyncio.create_task(take(entries, 2))
    await asyncio.sleep(0.05)
    await bus.publish(prompt(600))
    await bus.publish(prompt(601))
    assert [entry.sample for entry in await tail] == [(600, 0), (601, 0)]


async def test_a_reader_may_start_behind_the_end(bus: Bus) -> None:
    await bus.publish(prompt(0))
    tail = asyncio.create_task(take(bus.read(PROMPTS, 2), 1))
    await asyncio.sleep(0.05)
    await bus.publish(prompt(1))
    assert [entry.seq for entry in await tail] == [2]


async def test_get_keeps_the_order_asked_for(bus: Bus) -> None:
    for group in range(100):
        await bus.publish(prompt(group))
    wanted = [50, 1, 100, 7, 7, *range(10, 60)]
    assert [entry.seq for entry in await bus.get(PROMPTS, wanted)] == wanted
    assert await bus.get(PROMPTS, []) == []


async def test_get_of_what_is_not_there_says_so(bus: Bus) -> None:
    await bus.publish(prompt(1))
    with pytest.raises(LookupError):
        await bus.get(PROMPTS, [1, 2])


async def test_the_last_of_a_key_is_its_newest(bus: Bus) -> None:
    assert await bus.last(PARTIALS, "1-0") is None
    await bus.publish(partial(1, 2))
    await bus.publish(partial(2, 3))
    await bus.publish(partial(1, 4))
    newest = await bus.last(PARTIALS, "1-0")
    assert newest is not None
    assert newest.message() == partial(1, 4)
    assert (await bus.info(PARTIALS)).messages == 2  # one a key


async def test_the_last_of_a_stream_is_its_newest(bus: Bus) -> None:
    assert await bus.last(CONTROL) is None
    await bus.publish(Control(action="start", nonce="a", recipe="x: 1"))
    await bus.publish(Control(action="stop", nonce="b"))
    newest = await bus.last(CONTROL)
    assert newest is not None
    assert newest.message() == Control(action="stop", nonce="b")


async def test_info_counts(bus: Bus) -> None:
    empty = await bus.info(PROMPTS)
    assert (empty.first_seq, empty.last_seq, empty.messages) == (1, 0, 0)
    await bus.publish(prompt(1))
    await bus.publish(prompt(2))
    info = await bus.info(PROMPTS)
    assert (info.first_seq, info.last_seq, info.messages) == (1, 2, 2)
    assert info.nbytes > 0


async def test_backlog_counts_what_waits_and_what_is_out(bus: Bus) -> None:
    for group in range(5):
        await bus.publish(prompt(group))
    async with bus.subscribe(ROLLOUT_WORKERS) as subscription:
        [_] = await subscription.fetch(1, WAIT_S)
        backlog = await bus.backlog(ROLLOUT_WORKERS)
        assert (backlog.pending, backlog.ack_pending) == (4, 1)
    assert (await bus.backlog(REWARD_WORKERS)).pending == 0


async def test_purge_deletes_below_and_keeps_the_count(bus: Bus) -> None:
    for group in range(5):
        await bus.publish(prompt(group))
    await bus.purge(PROMPTS, 4)
    info = await bus.info(PROMPTS)
    assert (info.first_seq, info.last_seq, info.messages) == (4, 5, 2)
    assert [entry.seq for entry in await take(bus.read(PROMPTS), 2)] == [4, 5]
    await bus.purge(PROMPTS, 6)
    info = await bus.info(PROMPTS)
    assert (info.first_seq, info.last_seq, info.messages) == (6, 5, 0)
    assert (await bus.publish(prompt(9))).seq == 6


async def test_a_lease_has_one_holder(bus: Bus, new_client: NewClient) -> None:
    other = await new_client()
    revision = await bus.acquire("controller", "a", 5.0)
    assert revision is not None
    assert await other.acquire("controller", "b", 5.0) is None
    renewed = await bus.renew("controller", "a", revision, 5.0)
    assert renewed is not None
    assert await bus.renew("controller", "a", revision, 5.0) is None  # by the old revision: no longer ours
    holder = await other.last(LEASES, "controller")
    assert holder is not None
    assert holder.data == b"a"
    assert await other.acquire("trainer", "b", 5.0) is not None


async def test_a_released_lease_is_free_at_once(bus: Bus, new_client: NewClient) -> None:
    other = await new_client()
    revision = await bus.acquire("controller", "a", 5.0)
    assert revision is not None
    await bus.release("controller", revision)
    assert await other.acquire("controller", "b", 5.0) is not None
    await bus.release("controller", revision)  # no longer ours: must not take it from the other
    assert await bus.acquire("controller", "a", 5.0) is None


async def test_a_lease_ends_with_its_time(bus: Bus, new_client: NewClient) -> None:
    """The standby takes over from a holder that died."""
    other = await new_client()
    revision = await bus.acquire("controller", "a", 1.0)
    assert revision is not None
    async with asyncio.timeout(WAIT_S):
        while (taken := await other.acquire("controller", "b", 1.0)) is None:
            await asyncio.sleep(0.05)
    assert taken > revision
    assert await bus.renew("controller", "a", revision, 1.0) is None


async def test_beats_are_heard_by_who_listens(bus: Bus, new_client: NewClient) -> None:
    other = await new_client()
    await bus.beat({"actor": "lost"})
    await bus.info(PROMPTS)  # a round trip: the server has seen the beat
    beats = other.beats()
    heard = asyncio.create_task(anext(beats))
    await asyncio.sleep(0.05)
    await other.info(PROMPTS)  # and knows that the other listens
    await bus.beat({"actor": "rollout-1", "tokens_s": 120.5, "queue": [1, 2]})
    async with asyncio.timeout(WAIT_S):
        assert await heard == {"actor": "rollout-1", "tokens_s": 120.5, "queue": [1, 2]}


async def test_a_dead_letter_keeps_the_bytes_and_tells_why(bus: Bus) -> None:
    await bus.publish(prompt(12, 3))
    [entry] = await bus.get(PROMPTS, [1])
    await bus.dead_letter(entry, "gave up\r\nafter 20 deliveries")
    await bus.dead_letter(entry, "twice")
    [dead] = await take(bus.read(DEAD), 1)
    assert dead.data == entry.data
    assert dead.key == "prompts"
    assert dead.headers["Rs-Reason"] == "gave up after 20 deliveries"
    assert (dead.headers["Rs-From"], dead.headers["Rs-Seq"], dead.headers["Rs-Was"]) == ("prompts", "1", "12-3")
    assert (await bus.info(DEAD)).messages == 1


async def test_streams_do_not_mix(bus: Bus) -> None:
    await bus.publish(Dropped(group_id=1, index=0, reason="stale"))
    for stream in (PROMPTS, ROLLOUTS, BATCHES):
        assert (await bus.info(stream)).messages == 0
    assert (await bus.info(DROPPED)).messages == 1


async def test_the_first_and_the_last_entry_of_a_key_are_told_apart(bus: Bus) -> None:
    """Of an answer that is stored twice all must take the same one."""
    turns = [
        Turn(group_id=group, index=0, number=0, prompt_tokens=[token], seed=1, min_version=0)
        for group, token in ((1, 5), (2, 5), (1, 6), (2, 6))
    ]
    assert await bus.first(TURNS, turns[0].place) is None
    for turn in turns:
        await bus.publish(turn)
    for group in (0, 1):
        first, last = await bus.first(TURNS, turns[group].place), await bus.last(TURNS, turns[group].place)
        assert first is not None
        assert last is not None
        assert (first.seq, first.id) == (group + 1, turns[group].id)
        assert (last.seq, last.id) == (group + 3, turns[group + 2].id)
    await bus.purge(TURNS, 3)
    first = await bus.first(TURNS, turns[0].place)
    assert first is not None
    assert first.seq == 3
