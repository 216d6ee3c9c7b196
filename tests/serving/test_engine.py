"""The engine in this process: what sessions compute together, and who waits for whom."""

import queue
import threading
import time

import numpy as np
import pytest
import torch
from tests.support import evaluated_model

pytest.importorskip("fastapi", reason="trellis serve needs the extra `serve`")

from trellis.mixers import MIXERS
from trellis.models.cache import TrellisCache
from trellis.models.sampling import Sampling, generate
from trellis.serving import engine
from trellis.serving.engine import Busy, Engine, Failed, Finished, Job, Progress, Text, TimeIsUp
from trellis.serving.metrics import Metrics
from trellis.serving.observer import Observer
from trellis.serving.states import DamagedState, NoRoom, Pool, State, Store, UnknownState

GREEDY = Sampling(0)


class Bench:
    """An engine, and jobs whose events are kept in their order."""

    def __init__(self, mixer="trellis", budget=2**28, **options):
        self.evaluated = evaluated_model(mixer)
        self.model, self.tokenizer = self.evaluated.network, self.evaluated.tokenizer
        self.metrics = Metrics()
        self.store = Store(self.model, self.metrics, budget)
        options = {"segment": 16, "most_rows": 40, **options}
        self.engine = Engine(self.model, self.tokenizer, self.store, self.metrics, **options)
        self.events = queue.Queue()
        self.log = []

    def __enter__(self):
        self.engine.start()
        return self

    def __exit__(self, *_):
        self.engine.stop()

    def job(self, text, listen=None, **options):
        pieces = [self.tokenizer.encode(text)] if isinstance(text, str) else text
        made = Job(pieces=iter(pieces), listen=lambda event: None, **{"way": GREEDY, **options})

        def heard(event):
            self.log.append((made, event))
            if listen is not None:
                listen(made, event)
            self.events.put((made, event))

        made.listen = heard
        return made

    def running(self, text="a", **options):
        """A job that has been handed in and is being answered, by default without an end."""
        started = threading.Event()
        job = self.job(text, lambda *_: started.set(), **{"max_tokens": 10**9, **options})
        self.engine.submit(job)
        assert started.wait(60)
        return job

    def run(self, *jobs):
        """The answers of jobs that are handed in together: ids by job and choice."""
        self.engine.submit(*jobs)
        return self.wait(*jobs)

    def wait(self, *jobs):
        left = {id(job): len(job.seeds) for job in jobs}
        found = {}
        while any(left.values()):
            job, event = self.events.get(timeout=120)
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                left[id(job)] = left.get(id(job), 0) - 1
                found.setdefault(id(job), {})[event.choice] = event
        return [[found[id(job)][k] for k in range(len(job.seeds))] for job in jobs]

    def text(self, job, choice=0):
        parts = [e.text for j, e in self.log if j is job and isinstance(e, Text)]
        return "".join(parts)


RECURRENT = [name for name in MIXERS if name != "transformer"]


@pytest.mark.parametrize("mixer", [*RECURRENT, "transformer"])
def test_a_batch_answers_as_each_request_alone(mixer):
    """Greedy and drawn, of all lengths, joining and leaving: the same tokens, one by one."""
    prompts = [("ab" * n, 5 + 3 * n) for n in range(1, 9)]
    ways = [GREEDY, Sampling(1.0, 1.0), Sampling(0.8, 0.9)]

    sizes = []

    def jobs(bench):
        return [
            bench.job(
                text, max_tokens=limit, way=ways[n % 3], seeds=[7 + n], keep_state=True,
                listen=lambda *_: sizes.append(bench.engine.rows),
            )
            for n, (text, limit) in enumerate(prompts)
        ]  # fmt: skip

    with Bench(mixer) as bench:
        alone = [bench.run(job)[0][0] for job in jobs(bench)]
    assert max(sizes) == 1
    with Bench(mixer) as bench:
        together = [answers[0] for answers in bench.run(*jobs(bench))]
    assert max(sizes) > 4
    for one, other in zip(alone, together):
        assert one.ids == other.ids
        assert one.cache.seen == other.cache.seen
        for (name, a), (_, b) in zip(one.cache._tensors(), other.cache._tensors()):
            assert torch.allclose(a, b, atol=1e-5), name


def test_more_sessions_than_a_group_takes():
    with Bench() as bench:
        (alone,) = bench.run(bench.job("hello", max_tokens=12))
        largest = []
        jobs = [
            bench.job(
                "hello", max_tokens=12,
                listen=lambda job, event: largest.append(bench.engine.rows),
            )
            for _ in range(36)
        ]  # fmt: skip
        found = bench.run(*jobs)
        assert all(answers[0].ids == alone[0].ids for answers in found)
        assert max(largest) == 36


def test_answers_are_those_of_trellis_generate():
    with Bench() as bench:
        job = bench.job("The memory", max_tokens=30, keep_state=True)
        ((done,),) = bench.run(job)
        cache = bench.model.init_cache(1)
        parts = generate(bench.model, bench.tokenizer, "The memory", cache, max_tokens=30,
                         temperature=0)  # fmt: skip
        assert bench.text(job) == "".join(parts)
        assert done.cache.seen == cache.seen
        for (name, a), (_, b) in zip(done.cache._tensors(), cache._tensors()):
            assert torch.allclose(a, b, atol=1e-5), name


def test_a_long_document_delays_nobody_by_more_than_a_segment():
    with Bench(segment=16) as bench:
        with torch.no_grad():  # every token is ASCII, so that each is a text of its own
            bench.model.model.embed_tokens.weight[128:] = 0
        running = bench.job("x", max_tokens=60)
        document = bench.job((np.full(100, 97) for _ in range(20)), max_tokens=0, keep_state=True)
        bench.run(running, document)
        between, most = 0, 0
        last = max(n for n, (job, _) in enumerate(bench.log) if job is running)
        for job, event in bench.log[:last]:
            if job is document and isinstance(event, Progress):
                between += 1
                most = max(most, between)
            elif job is running and isinstance(event, Text):
                between = 0
        assert most == 1
        steps = [e.tokens for j, e in bench.log if j is document and isinstance(e, Progress)]
        assert max(np.diff([0, *steps])) == 16
        assert steps[-1] == 2000


def test_a_shared_beginning_is_read_once():
    system = "You are a gardener. " * 4
    with Bench() as bench:
        first, second = (bench.job(system + end, max_tokens=4) for end in ("roses?", "trees?"))
        third = bench.job(system + "grass?", max_tokens=4, keep_state=True)
        bench.run(first)
        bench.run(second)  # finds what both share
        ((done,),) = bench.run(third)
        assert (first.known, second.known, third.known) == (0, 0, len(system))
        again = bench.job(system + "grass?", max_tokens=4)
        bench.run(again)
        assert again.known == len(system + "grass?")  # all of it: its state was kept
        bench.run(bench.job("instructions", max_tokens=4, places=[7]))
        seventh = bench.job("instructed", max_tokens=1)
        bench.run(seventh)
        assert seventh.known == 7
        assert bench.metrics.prefix_hits._value.get() == 3
        assert bench.metrics.prefix_tokens._value.get() == 2 * len(system) + 6 + 7
    with Bench(budget=1) as without:
        ((alone,),) = without.run(without.job(system + "grass?", max_tokens=4, keep_state=True))
    assert alone.ids == done.ids


def test_an_answer_ends_before_the_text_that_stops_it():
    with Bench() as bench:
        whole = bench.job("stop here", max_tokens=40)
        bench.run(whole)
        text = bench.text(whole)
        stop = text[20:23]
        job = bench.job("stop here", max_tokens=40, stops=["no such text", stop], keep_state=True)
        ((done,),) = bench.run(job)
        kept = text[: text.index(stop)]
        assert (bench.text(job), done.reason) == (kept, "stop")
        # The state has read what was answered, and not what stopped it.
        assert bench.tokenizer.decode(done.read) == kept
        expected = bench.model.read(torch.tensor([[*b"stop here", *done.read]]))
        assert done.cache.seen == expected.seen
        for (name, a), (_, b) in zip(done.cache._tensors(), expected._tensors()):
            assert torch.allclose(a, b, atol=1e-5), name


def test_a_stop_of_several_tokens_is_no_part_of_the_state(monkeypatch):
    """The bytes of é are two tokens; the first one adds no text, and must not be kept."""
    drawn = iter("caf\u00e9".encode())
    monkeypatch.setattr(engine, "choose", lambda logits, *_: [next(drawn) for _ in logits])
    with Bench() as bench:
        job = bench.job("x", max_tokens=20, stops=["\u00e9"], keep_state=True)
        ((done,),) = bench.run(job)
        assert (bench.text(job), done.reason) == ("caf", "stop")
        assert done.read == list(b"caf")
        assert done.cache.seen == [4]


def test_half_a_character_is_told_at_the_end_of_the_document(monkeypatch):
    with Bench() as bench:
        drawn = iter([*b"a\xc3", bench.tokenizer.end_of_document])
        monkeypatch.setattr(engine, "choose", lambda logits, *_: [next(drawn) for _ in logits])
        job = bench.job("x", max_tokens=20)
        ((done,),) = bench.run(job)
        assert (bench.text(job), done.ended) == ("a\ufffd", True)


def test_a_cut_reading_is_the_state_of_what_was_read():
    """Not of the whole prompt: another prompt must not go on from it as if all was read."""
    with Bench(segment=16) as bench:

        def end(job, event):
            job.deadline = 0

        cut = bench.job("abcdefgh" * 10, max_tokens=0, keep_state=True, listen=end)
        ((done,),) = bench.run(cut)
        assert (done.cut, done.cache.seen) == ("time", [16])
        assert len(cut.prompt) == cut.read == 16


def test_several_answers_have_seeds_of_their_own():
    with Bench() as bench:
        way = Sampling(1.0, 1.0)
        (three,) = bench.run(bench.job("roll", seeds=[1, 2, 1], max_tokens=20, way=way))
        (one,) = bench.run(bench.job("roll", seeds=[2], max_tokens=20, way=way))
        assert three[0].ids == three[2].ids != three[1].ids == one[0].ids


def test_a_cancelled_job_frees_its_place():
    with Bench(most_rows=1) as bench:
        endless = bench.running()
        other = bench.job("b", max_tokens=3)
        bench.engine.submit(other)
        bench.engine.cancel(endless)
        ((done,),) = bench.wait(other)
        assert len(done.ids) == 3
        assert not any(isinstance(e, Finished) for job, e in bench.log if job is endless)


def test_a_full_queue_and_a_late_answer():
    with Bench(most_rows=1, most_waiting=2) as bench:
        endless = bench.running(seconds=600)
        waiting = [bench.job("b", max_tokens=2) for _ in range(2)]
        bench.engine.submit(*waiting)
        with pytest.raises(Busy, match="2 requests are waiting already") as refused:
            bench.engine.submit(bench.job("c"))
        assert refused.value.seconds > 0
        endless.deadline = 0
        ((late,), *_) = bench.wait(endless, *waiting)
        assert (late.reason, late.cut) == ("length", "time")
        document = bench.job((np.full(16, 97) for _ in range(10**9)), max_tokens=5, seconds=0.3)
        with pytest.raises(TimeIsUp, match=r"not read in 0\.3 seconds"):
            bench.run(document)


def test_a_job_that_waits_too_long_fails():
    with Bench(most_rows=1) as bench:
        endless = bench.running()
        with pytest.raises(TimeIsUp, match=r"no place was free in 0\.1 seconds"):
            bench.run(bench.job("b", max_tokens=2, seconds=0.1))
        bench.engine.cancel(endless)


def test_more_prompts_than_may_wait_are_answered_where_nobody_waits():
    with Bench(most_rows=1, most_waiting=2) as bench:
        found = bench.run(*(bench.job("a", max_tokens=2) for _ in range(4)))
        assert len(found) == 4


def test_shutting_down_ends_answers_with_their_states():
    with Bench() as bench:
        endless = bench.running(keep_state=True)
        bench.engine.drain(0.2)
        with pytest.raises(Busy, match="shutting down"):
            bench.engine.submit(bench.job("b"))
        ((done,),) = bench.wait(endless)
        assert done.cut == "shutdown"
        assert done.cache.seen == [1 + len(done.ids)]


def test_a_bad_state_fails_alone():
    with Bench() as bench:
        spoiled = bench.model.read(torch.tensor([[97]]))
        for _, tensor in spoiled._tensors():
            tensor.fill_(torch.nan)
        good = bench.running("fine", max_tokens=40)
        with pytest.raises(ValueError, match="not finite"):
            bench.run(bench.job("x", cache=spoiled, max_tokens=5))
        end = time.monotonic() + 120
        while not any(isinstance(e, Finished) for job, e in bench.log if job is good):
            assert time.monotonic() < end
            time.sleep(0.01)


def test_the_observer_sees_what_inspection_measures():
    from trellis.evaluation.inspection import inspect

    evaluated = evaluated_model(mixer_config={"heads": 2})
    ids = list(b"look at this")
    arrays = inspect(evaluated, ids)
    observer = Observer(evaluated.network, evaluated.tokenizer, evaluated.network.init_cache(1),
                        layer=1, head=1)  # fmt: skip
    seen = observer.read(ids)
    for n, name in ((0, "keys"), (1, "values")):
        gates = [one["forget"][n] for one in seen]
        assert np.allclose(gates, arrays[f"{name}_forget_gate"][1, 1], atol=1e-3)
        steps = [one["step"][n] for one in seen]
        assert np.allclose(steps, arrays[f"{name}_step_size"][1, 1], atol=1e-3)
        norms = [np.square(one[name]).sum() ** 0.5 for one in seen]
        assert np.allclose(norms, arrays[f"{name}_memory_norm"][1, 1], atol=1e-3)
    assert seen[0]["token"] == "l"
    assert len(seen[-1]["words"]) == 6


# The store.


def cache_after(model, tokens):
    return model.read(torch.arange(tokens)[None] % 97)


def test_what_costs_least_to_read_again_goes_first():
    model = evaluated_model().network
    size = cache_after(model, 1).nbytes
    metrics = Metrics()
    pool = Pool(3 * size, metrics)
    gone = []
    for tokens in (50, 10, 45, 30):
        gone += pool.put(str(tokens), cache_after(model, tokens), tokens)
    assert gone == ["10"]
    gone = pool.put("20", cache_after(model, 20), 20)
    assert gone == ["30"]
    assert pool.bytes == 3 * size == metrics.memory_bytes._value.get()
    assert metrics.evictions._value.get() == 2
    with pytest.raises(NoRoom, match="larger than the budget"):
        Pool(size - 1, metrics).put("x", cache_after(model, 5), 5)


def test_states_in_memory_go_when_the_budget_is_used_up():
    model = evaluated_model().network
    size = cache_after(model, 1).nbytes
    store = Store(model, Metrics(), 2 * size)
    kept = [store.add(c, State.of(c, "read")) for c in (cache_after(model, n) for n in (9, 5, 7))]
    with pytest.raises(UnknownState):
        store.open(kept[1].id)
    assert [state.tokens for state in store.list()] == [9, 7]


def test_states_in_files_are_loaded_again(tmp_path):
    model = evaluated_model().network
    size = cache_after(model, 1).nbytes
    store = Store(model, Metrics(), 2 * size, tmp_path)
    kept = [store.add(c, State.of(c, "read")) for c in (cache_after(model, n) for n in range(1, 6))]
    assert len(store.pool.held) == 2
    for state in kept:
        found, cache = store.open(state.id)
        assert (found, cache.seen) == (state, [state.tokens])
    store.close()
    again = Store(model, Metrics(), 2 * size, tmp_path)
    assert again.list() == kept  # oldest first
    again.close()


def test_a_state_whose_file_is_gone(tmp_path):
    model = evaluated_model().network
    store = Store(model, Metrics(), folder=tmp_path / "states")
    assert (tmp_path / "states").stat().st_mode & 0o777 == 0o700
    cache = cache_after(model, 9)
    state = store.add(cache, State.of(cache, "read"))
    (tmp_path / "states" / state.data).unlink()
    with pytest.raises(DamagedState, match="cannot be read"):
        store.content(state.id)
    store.delete(state.id)
    with pytest.raises(UnknownState):
        store.content(state.id)
    store.close()


def test_a_named_state_takes_the_place_of_a_beginning():
    model = evaluated_model().network
    store = Store(model, Metrics())
    ids, cache = np.arange(9), cache_after(model, 9)
    store.keep_prefix(ids, cache)
    state = store.add(cache, State.of(cache, "read"), ids)
    assert list(store.pool.held) == [state.id]
    assert store.longest_prefix(np.arange(12))[0] == 9


def test_a_fork_shares_the_file_until_both_are_gone(tmp_path):
    model = evaluated_model().network
    store = Store(model, Metrics(), folder=tmp_path)
    cache = cache_after(model, 9)
    state = store.add(cache, State.of(cache, "read"))
    fork = store.fork(state.id, "other")
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    store.delete(state.id)
    assert store.open(fork.id)[1].seen == [9]
    store.delete(fork.id)
    assert not list(tmp_path.iterdir())
    store.close()


def test_what_a_crash_leaves_is_removed_and_the_rest_is_found(tmp_path, caplog):
    model = evaluated_model().network
    store = Store(model, Metrics(), folder=tmp_path)
    cache = cache_after(model, 9)
    good, cut, foreign = (store.add(cache, State.of(cache, "read")) for _ in range(3))
    with pytest.raises(ValueError, match="another process is at work"):
        Store(model, Metrics(), folder=tmp_path)
    store.close()
    data = tmp_path / cut.data
    data.write_bytes(data.read_bytes()[:-1])
    (tmp_path / f".{cut.data}.abcd1234").write_bytes(b"half a file")
    (tmp_path / ("0" * 32 + ".safetensors")).write_bytes(b"never acknowledged")
    (tmp_path / "mine.safetensors").write_bytes(b"somebody's own")
    path = tmp_path / f"{foreign.id}.json"
    path.write_text(path.read_text().replace(store.fingerprint, "other"))
    again = Store(model, Metrics(), folder=tmp_path)
    assert [state.id for state in again.list()] == [good.id]
    assert "left out" in caplog.text
    assert "1 states" in caplog.text
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {
        f"{good.id}.json", f"{cut.id}.json", f"{foreign.id}.json", good.data, cut.data,
        foreign.data, "mine.safetensors",
    }  # fmt: skip
    again.close()


def test_a_made_up_state_is_refused(tmp_path):
    model = evaluated_model("transformer").network
    store = Store(model, Metrics())
    cache = cache_after(model, 9)
    state = cache.states[0]
    for bad in (
        state._replace(length=torch.tensor([-5])),
        state._replace(keys=state.keys[:, :, :3]),
        state._replace(values=state.values * torch.nan),
    ):
        made = cache.detach()
        made.states = [bad, *cache.states[1:]]
        made.save(tmp_path / "made")
        with pytest.raises(ValueError, match="a state must"):
            store.upload(tmp_path / "made", None)
    (tmp_path / "made").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="the file") as refused:
        store.upload(tmp_path / "made", None)
    assert str(tmp_path) not in str(refused.value)
    two = TrellisCache.join([cache, cache])
    two.save(tmp_path / "two")
    with pytest.raises(ValueError, match="one session; got 2"):
        store.upload(tmp_path / "two", None)
