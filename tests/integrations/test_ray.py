"""A buffer in a Ray actor and its clients; needs the extra ``ray``."""

from __future__ import annotations

import doctest
import importlib
import sys
import time
import warnings
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch
from support import RAY_TOKEN, TIMEOUT
from support import records as records_of
from tensordict import TensorDict
from torchrl.data import ListStorage, RayReplayBuffer, TensorDictReplayBuffer

import torchrl_generational as g

ray = pytest.importorskip("ray")
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    importlib.import_module("torchrl.collectors.distributed.ray")  # warns of its own classes; Ray buffers import it
from ray.cluster_utils import Cluster  # noqa: E402
from ray.exceptions import RayActorError  # noqa: E402

import torchrl_generational.ray  # noqa: E402
from torchrl_generational.ray import GenerationalRayReplayBuffer, in_actor  # noqa: E402
from torchrl_generational.trainer import use_conditional_updates  # noqa: E402

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import this file

SIZE = 8
STORE = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
AT_BUFFER = {"num_cpus": 0, "resources": {"buffer": 0.01}}
AT_CLIENTS = {"num_cpus": 0, "resources": {"clients": 0.01}}


def records(count: int, start: int = 0, version: int = 0) -> TensorDict:
    """Records ``x = start, ...``, all born at a priority of 1."""
    return records_of(count, start, version=torch.full((count,), version), td_error=torch.ones(count))


@pytest.fixture(scope="module", params=["one node", pytest.param("two nodes", marks=pytest.mark.slow)])
def nodes(request) -> Iterator[int]:
    """A Ray of this machine alone: the driver and the clients on one node, the buffers on it too or on another."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_AUTH_TOKEN", RAY_TOKEN)
        cluster = None
        try:
            if request.param == "one node":
                ray.init(num_cpus=1, resources={"buffer": 1, "clients": 1}, log_to_driver=False, **STORE)
            else:
                cluster = Cluster(
                    initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"clients": 1}, **STORE}
                )
                cluster.add_node(num_cpus=1, resources={"buffer": 1}, object_store_memory=STORE["object_store_memory"])
                ray.init(address=cluster.address, log_to_driver=False)
            yield len(ray.nodes())
        finally:
            ray.shutdown()
            if cluster is not None:
                cluster.shutdown()


def make(cls: Any = g.GenerationalTensorDictPrioritizedReplayBuffer, **kwargs: Any) -> Any:
    if cls is g.GenerationalTensorDictPrioritizedReplayBuffer:
        kwargs = {"alpha": 1.0, "beta": 1.0, **kwargs}
    kwargs.setdefault("storage", partial(g.GenerationalLazyTensorStorage, SIZE))
    remote_config = {**AT_BUFFER, "max_restarts": -1}
    return GenerationalRayReplayBuffer(replay_buffer_cls=cls, batch_size=SIZE, remote_config=remote_config, **kwargs)


@pytest.fixture(scope="module")
def actor(nodes) -> Iterator[Any]:
    rb = make()
    yield rb
    rb.close()


@pytest.fixture
def rb(actor) -> Any:
    """A buffer without records in an actor that all these tests share: starting one takes seconds."""
    actor.empty()
    return actor


def handles(rb: Any) -> TensorDict:
    """A sample that has every record once, by slot."""
    generations = rb.state_dict()["_writer"]["_generation"]
    index = torch.arange(len(rb))
    return rb[:].select("x").set("index", index).set("index_generation", generations[: len(rb)].clone())


def leaves(rb: Any) -> list[float]:
    """The priority in the actor of every record, by slot."""
    return ray.get(rb._rb.__ray_call__.remote(lambda there: there.sampler._sum_tree[torch.arange(len(there))].tolist()))


def update(rb: Any, sample: TensorDict) -> g.UpdateResult:
    return rb.update_priority_if_present(index=sample["index"], generation=sample["index_generation"], priority=5.0)


def node_of(rb: Any) -> str:
    return ray.get(rb._rb.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))


def kill(rb: Any) -> None:
    """Ends the actor's process, and returns when Ray has started another one."""

    def process() -> int:
        return ray.get(rb._rb.__ray_call__.remote(lambda _: __import__("os").getpid()))

    before, deadline = process(), time.monotonic() + TIMEOUT
    ray.kill(rb._rb, no_restart=False)
    while time.monotonic() < deadline:
        try:
            if process() != before:
                return
        except RayActorError:
            pass  # Ray waits a while before it raises this
    raise TimeoutError("the actor did not come back")


# ------------------------------------------------------------------ one caller after the other


@pytest.mark.parametrize("caller", ["the buffer", "a client"])
def test_an_update_brings_back_which_records_were_there(rb, caller):
    caller = rb if caller == "the buffer" else rb.client()
    caller.extend(records(SIZE))
    sample = caller.sample()
    assert sample["x"].tolist() == sample["index"].tolist()
    caller.extend(records(3, 100))
    sample["td_error"] = torch.full((SIZE,), 5.0)
    result = caller.update_tensordict_priority_if_present(sample)
    assert type(result) is g.UpdateResult
    assert result.updated_mask.dtype == torch.bool
    assert result.updated_mask.tolist() == [record >= 3 for record in sample["x"].tolist()]
    updated = set(sample["x"].tolist()) - {0, 1, 2}
    assert leaves(rb) == [5.0 if slot in updated else 1.0 for slot in range(SIZE)]
    again = caller.update_priority_if_present(
        index=sample["index"], generation=sample["index_generation"], priority=sample["td_error"]
    )
    assert again.updated_mask.tolist() == result.updated_mask.tolist()


def test_the_raw_update_puts_td_errors_on_other_records(rb):
    rb.extend(records(SIZE))
    sample = handles(rb)
    rb.extend(records(3, 100))
    rb.update_tensordict_priority(sample.set("td_error", torch.full((SIZE,), 5.0)))
    assert leaves(rb) == [5.0] * SIZE  # the first three are of records that nobody has learned from


def test_an_update_may_be_waited_for_later(rb):
    rb.extend(records(SIZE))
    sample = handles(rb)
    rb.extend(records(3, 100))
    priority = torch.full((SIZE,), 5.0)
    asked = {"index": sample["index"], "generation": sample["index_generation"]}
    futures = [
        rb.submit_update_priority_if_present(**asked, priority=priority),
        rb.client().submit_update_tensordict_priority_if_present(sample.set("td_error", 2 * priority)),
        rb.submit_update_if_present(**asked, patch={"x": sample["x"] + 50}),
    ]
    priority.zero_()  # what was handed over is the caller's again
    assert leaves(rb) == [1.0] * 3 + [10.0] * 5  # later calls come after them
    assert rb[:]["x"].tolist() == [100, 101, 102, 53, 54, 55, 56, 57]
    for future in futures:
        assert isinstance(future, Future)
        assert future.result(TIMEOUT).updated_mask.tolist() == [False] * 3 + [True] * 5
    refused = rb.submit_update_priority_if_present(**asked, priority=-1.0)
    with pytest.raises(ValueError, match="priority must be finite and >= 0"):
        refused.result(TIMEOUT)


def test_fields_are_updated_where_their_record_is(rb):
    rb.extend(torch.cat([records(1, slot, version=slot) for slot in range(SIZE)]))
    sample = handles(rb)
    rb.extend(records(3, 100))
    asked = {"index": sample["index"], "generation": sample["index_generation"], "version_key": "version"}
    for caller in (rb, rb.client()):
        result = caller.update_if_present(**asked, patch={"x": sample["x"] + 50}, version=torch.full((SIZE,), 4))
        assert result.updated_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 3
        assert result.rejected_mask.tolist() == [False] * 5 + [True] * 3
    assert rb[:]["x"].tolist() == [100, 101, 102, 53, 54, 5, 6, 7]


def test_the_totals_of_all_clients_are_counted_in_the_actor(rb):
    before = rb.stats()
    rb.extend(records(SIZE))
    sample = handles(rb)
    rb.extend(records(3, 100))
    for caller in (rb, rb.client()):
        caller.update_priority_if_present(
            index=sample["index"], generation=sample["index_generation"], priority=torch.ones(SIZE)
        )
    after = rb.client().stats()
    assert after["conditional_updated"] - before["conditional_updated"] == 10
    assert after["conditional_stale"] - before["conditional_stale"] == 6


def test_bad_input_is_refused_in_the_actor_and_changes_nothing(rb):
    rb.extend(records(SIZE))
    sample = handles(rb)
    asked = {"index": sample["index"], "generation": sample["index_generation"]}
    with pytest.raises(ValueError, match="at row 2"):
        rb.update_priority_if_present(**asked, priority=torch.tensor([1.0, 2.0, torch.nan, 4, 5, 6, 7, 8]))
    with pytest.raises(IndexError):
        rb.update_priority_if_present(**asked | {"index": sample["index"] + 3}, priority=1.0)
    with pytest.raises(KeyError, match=r"reads the entry 'td_error', and the data has only \['index', .*'x'\]"):
        rb.client().update_tensordict_priority_if_present(sample)
    assert leaves(rb) == [1.0] * SIZE


def test_only_handles_and_priorities_travel(rb):
    rb.extend(records(SIZE))
    sample = handles(rb).set("td_error", torch.full((SIZE,), 5.0, requires_grad=True) * 2)

    class Untransferable:
        def __reduce__(self) -> Any:
            raise AssertionError("sent")

    sample.set_non_tensor("image", Untransferable())
    assert rb.update_tensordict_priority_if_present(sample).num_updated == SIZE
    pair = namedtuple("pair", "a b")(torch.ones(1), torch.ones(1))
    assert type(rb.client()._sent(pair)) is type(pair)
    small = torch.zeros(100_000)[:SIZE]
    assert len(ray.cloudpickle.dumps(small)) > 100_000
    assert len(ray.cloudpickle.dumps(rb.client()._sent([small, (small,), {"x": small}]))) < 10_000


def test_the_handles_of_a_rebuilt_sample_say_which_error_is_of_which_record(rb):
    rb.extend(records(SIZE))
    sample = handles(rb).set("td_error", torch.arange(11.0, 11.0 + SIZE))
    shorter = sample.reshape(2, SIZE // 2)
    shorter.batch_size = [2]
    for caller in (rb, rb.client()):
        for form in (sample.to_dict(), TensorDict(sample.to_dict()), shorter):
            caller.update_priority(torch.arange(SIZE), 1.0)
            assert caller.update_tensordict_priority_if_present(form).num_updated == SIZE
            assert leaves(rb) == pytest.approx(sample["td_error"].tolist())
        with pytest.raises(ValueError, match="cannot be told which TD error is of which record"):
            caller.update_tensordict_priority_if_present(shorter.copy().set("td_error", torch.ones(2)))
        with pytest.raises(TypeError, match="needs a sample, as a tensordict or a dict"):
            caller.update_tensordict_priority_if_present([sample])
        stamps = sample["index_generation"].int()
        with pytest.raises(TypeError, match="generation must hold integers of dtype int64"):
            caller.update_priority_if_present(index=sample["index"], generation=stamps, priority=1.0)
        assert leaves(rb) == pytest.approx(sample["td_error"].tolist())


def test_indices_may_be_of_any_form_that_the_buffer_takes(rb):
    rb.extend(records(SIZE))
    sample = handles(rb)
    generation = sample["index_generation"]
    for asked in (
        {"index": (sample["index"],), "generation": generation, "priority": 2.0},
        {"index": sample["index"], "generation": generation, "priority": torch.ones(SIZE, requires_grad=True) * 2},
        {"index": sample["index"].tolist(), "generation": generation.tolist(), "priority": [3.0] * SIZE},
        {"index": sample["index"].numpy(), "generation": generation.numpy(), "priority": generation.numpy() * 0.0 + 4},
    ):
        assert rb.update_priority_if_present(**asked).num_updated == SIZE
    assert leaves(rb) == [4.0] * SIZE


def test_the_switch_is_the_one_of_the_buffer_in_the_actor(rb):
    client = rb.client()
    assert not rb.conditional_updates
    use_conditional_updates(client)
    try:
        assert rb.conditional_updates is client.conditional_updates is True
        rb.extend(records(SIZE))
        sample = handles(rb)
        rb.extend(records(3, 100))
        rb.update_tensordict_priority(sample.set("td_error", torch.full((SIZE,), 5.0)))
        assert leaves(rb) == [1.0] * 3 + [5.0] * 5
    finally:
        rb.conditional_updates = False
    assert not client.conditional_updates
    assert client.keeps_priorities


def test_sharing_a_client_sends_no_copy_of_the_buffer(rb):
    client = rb.client()
    assert client.share() is client


# ------------------------------------------------------------------ several clients


def first_priority(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * x + 2


def td_error(x: torch.Tensor) -> torch.Tensor:
    """Tells of which record it is."""
    return first_priority(x) + 1


def act_and_learn(rb: Any, number: int, rounds: int) -> tuple[int, int]:
    """Writes half a ring, samples, has the ring turn while it learns, and updates; returns rows updated and stale."""
    updated = stale = 0
    for start in range(10_000 * number, 10_000 * number + SIZE * rounds, SIZE):
        for half in (0, SIZE // 2):
            x = torch.arange(start + half, start + half + SIZE // 2)
            rb.extend(TensorDict({"x": x, "version": x, "td_error": first_priority(x)}, [SIZE // 2]))
            if half == 0:
                sample = rb.sample()
        sample["td_error"] = td_error(sample["x"])
        if start % (2 * SIZE):
            result = rb.update_tensordict_priority_if_present(sample)
        else:
            result = rb.submit_update_tensordict_priority_if_present(sample).result(TIMEOUT)
        updated, stale = updated + result.num_updated, stale + result.num_stale
    return updated, stale


@ray.remote(**AT_CLIENTS)
class Client:
    """An actor that has a client; and ``act_and_learn`` is a task that has one."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def run(self, number: int, rounds: int) -> tuple[int, int]:
        return act_and_learn(self.client, number, rounds)


def test_no_td_error_of_any_client_reaches_another_record(rb, nodes):
    assert nodes == 1 or node_of(rb) != ray.get_runtime_context().get_node_id()
    before, rounds = rb.stats(), 40
    in_actor = Client.remote(rb.client())
    others = [
        in_actor.run.remote(1, rounds),
        ray.remote(**AT_CLIENTS)(act_and_learn).remote(rb.client(), 2, rounds),
    ]
    results = [act_and_learn(rb, 0, rounds), *ray.get(others, timeout=TIMEOUT)]
    x = rb[:]["x"]
    held = torch.tensor(leaves(rb))
    assert torch.equal((held - 2).div(2, rounding_mode="floor").long(), x)  # every priority is of its own record
    updated, stale = (sum(column) for column in zip(*results, strict=True))
    after = rb.stats()
    assert after["conditional_updated"] - before["conditional_updated"] == updated > 0
    assert after["conditional_stale"] - before["conditional_stale"] == stale > 0
    ray.kill(in_actor)


# ------------------------------------------------------------------ an actor that dies


def test_after_a_restart_every_handle_of_before_is_stale(rb, tmp_path):
    client = rb.client()
    client.extend(records(SIZE))
    before = handles(rb)
    rb.dumps(tmp_path)
    kill(rb)
    assert len(client) == 0
    client.extend(records(SIZE, 100))  # as many as before: plain counters would be where they were
    now = handles(rb)
    assert update(client, before).num_stale == SIZE
    assert leaves(rb) == [1.0] * SIZE
    assert update(client, now).num_updated == SIZE
    # a checkpoint that is loaded now is that of another timeline
    client.loads(tmp_path)
    assert rb[:]["x"].tolist() == list(range(SIZE))
    assert update(client, before).num_stale == SIZE
    assert update(client, now).num_stale == SIZE


@pytest.mark.parametrize("way", ["dumps", pytest.param("state_dict", marks=pytest.mark.slow)])
def test_a_checkpoint_makes_the_handles_of_its_records_live_again(rb, way, tmp_path):
    rb.extend(records(SIZE))
    early = handles(rb)
    state = rb.dumps(tmp_path) if way == "dumps" else rb.state_dict()
    rb.extend(records(3, 100))
    late = handles(rb)
    kill(rb)
    if way == "dumps":
        rb.loads(tmp_path)
    else:
        rb.load_state_dict(state)
    assert update(rb, early).num_updated == SIZE
    assert update(rb, late).updated_mask.tolist() == [False] * 3 + [True] * 5
    rb.extend(records(3, 200))
    for sample in (early, late):
        assert update(rb, sample).updated_mask.tolist() == [False] * 3 + [True] * 5


def test_a_buffer_for_an_actor_begins_at_an_incarnation_of_its_own():
    made = [in_actor(g.GenerationalReplayBuffer)() for _ in range(8)]
    assert len({rb.storage.slot_generations.incarnation for rb in made}) == 8
    filled = partial(g.GenerationalTensorStorage, records(SIZE))
    assert in_actor(g.GenerationalReplayBuffer)(storage=filled).storage.generations.min() > 2**32
    late = in_actor(g.GenerationalReplayBuffer)(delayed_init=True)
    assert late.storage.slot_generations.incarnation > 0


# ------------------------------------------------------------------ how it is made


@pytest.mark.parametrize("transport", ["distributed", pytest.param("auto", marks=pytest.mark.slow)])
def test_the_option_service_backend_makes_this_buffer_on_both_transports(nodes, transport):
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=partial(g.GenerationalLazyTensorStorage, SIZE),
        sampler=partial(g.GenerationalPrioritizedSampler, SIZE, 1.0, 1.0),
        batch_size=SIZE,
        service_backend="ray",
        service_backend_options={"remote_config": AT_BUFFER},
        transport=transport,
    )
    try:
        assert type(rb) is GenerationalRayReplayBuffer
        assert isinstance(rb, g.GenerationalTensorDictReplayBuffer)
        assert not isinstance(rb, g.GenerationalTensorDictPrioritizedReplayBuffer)
        for caller in (rb, rb.client()):  # torch.distributed sends batches of one size only
            caller.extend(records(SIZE // 2))
            caller.extend(records(SIZE // 2))
            sample = caller.sample()
            caller.extend(records(SIZE // 2, 100))
            sample["td_error"] = torch.full((SIZE,), 5.0)
            result = caller.update_tensordict_priority_if_present(sample)
            assert result.updated_mask.tolist() == (sample["index"] >= SIZE // 2).tolist()
            assert caller.stats()["conditional_updated"] > 0
            caller.extend(records(SIZE // 2, 100))
            asked = {"index": sample["index"], "generation": sample["index_generation"]}
            assert caller.update_if_present(**asked, patch={"x": sample["x"]}).num_stale == SIZE
            assert caller.submit_update_priority_if_present(**asked, priority=1.0).result(TIMEOUT).num_stale == SIZE
    finally:
        rb.close()
    with pytest.raises(RuntimeError, match="is closed"):
        rb.client()


def test_options_that_this_backend_does_not_have_are_refused():
    with pytest.raises(ValueError, match="service_backend='direct' or 'ray', not 'rpc'"):
        g.GenerationalTensorDictReplayBuffer(service_backend="rpc")
    with pytest.raises(TypeError, match="Unexpected Ray replay-buffer service options: .'num_cpus'."):
        g.GenerationalTensorDictReplayBuffer(service_backend="ray", service_backend_options={"num_cpus": 0})


def test_torchrls_own_ray_buffer_has_the_same_actor():
    """``RayReplayBuffer(replay_buffer_cls=...)`` makes it with ``as_remote``."""
    made = g.GenerationalReplayBuffer.as_remote({"num_cpus": 0}).__ray_metadata__.modified_class
    assert issubclass(made, in_actor(g.GenerationalReplayBuffer).__mro__[1])


@pytest.mark.slow
def test_a_buffer_without_entries_is_served_too(nodes):
    rb = make(
        g.GenerationalReplayBuffer,
        sampler=partial(g.GenerationalPrioritizedSampler, SIZE, 1.0, 1.0),
        delayed_init=True,
    )
    try:
        rb.extend(torch.arange(SIZE))
        data, info = rb.sample(return_info=True)
        rb.add(torch.tensor(100))
        result = rb.update_priority_if_present(index=info["index"], generation=info["index_generation"], priority=5.0)
        assert result.stale_mask.tolist() == (data == 0).tolist()
        with pytest.raises(AttributeError, match="replay_buffer_cls=GenerationalTensorDictReplayBuffer"):
            rb.update_tensordict_priority_if_present(records(1))
    finally:
        rb.close()


@pytest.mark.parametrize("transport", ["auto", pytest.param("distributed", marks=pytest.mark.slow)])
def test_what_the_buffer_refuses_in_its_actor_is_raised_here(nodes, transport):
    with pytest.raises(TypeError, match="carries slot generations, got ListStorage. Use GenerationalLazyTensorStorage"):
        make(storage=partial(ListStorage, SIZE), transport=transport)


class UnpicklableError(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def refusing() -> Any:
    raise UnpicklableError(1, 2)


@pytest.mark.slow
def test_a_refusal_that_cannot_travel_says_what_it_said(nodes):
    with pytest.raises(RuntimeError, match="UnpicklableError: 1 and 2"):
        make(storage=refusing)


def test_outside_an_actor_the_constructor_raises_its_own_error():
    with pytest.raises(TypeError, match="carries slot generations, got ListStorage"):
        in_actor(g.GenerationalReplayBuffer)(storage=ListStorage(SIZE))


def test_torchrls_class_raises_what_the_buffer_refuses_in_its_actor(nodes):
    rb = RayReplayBuffer(
        replay_buffer_cls=g.GenerationalReplayBuffer,
        storage=partial(ListStorage, SIZE),
        remote_config=AT_BUFFER,
    )
    with pytest.raises(RayActorError, match="carries slot generations, got ListStorage"):
        len(rb)
    rb.close()


def test_a_buffer_without_generations_is_refused_before_an_actor_is_started():
    with pytest.raises(TypeError, match="must be a generational buffer class, got TensorDictReplayBuffer. Use Gener"):
        GenerationalRayReplayBuffer(replay_buffer_cls=TensorDictReplayBuffer)
    with pytest.raises(TypeError, match="must be a generational buffer class, got 3"):
        GenerationalRayReplayBuffer(replay_buffer_cls=3)


def test_calls_on_the_buffer_return_it_and_not_a_copy(rb):
    assert rb.share() is rb
    assert rb.append_transform(partial(torch.clone)) is rb


def test_what_is_only_in_the_actor_says_so(rb):
    for name in ("storage", "sampler", "writer"):
        with pytest.raises(AttributeError, match="the buffer is in an actor"):
            getattr(rb, name)
    assert rb.client().can_sample(SIZE) is False
    assert repr(rb) == "GenerationalRayReplayBuffer(GenerationalTensorDictPrioritizedReplayBuffer, transport='ray')"


def test_the_examples_of_the_documentation_run(nodes):
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    for shown in (GenerationalRayReplayBuffer, in_actor):
        for example in finder.find(shown, globs=vars(torchrl_generational.ray.actors).copy()):
            runner.run(example)
    assert runner.tries > 8
    assert runner.failures == 0


def test_a_missing_ray_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in [name for name in sys.modules if name.startswith("torchrl_generational.ray")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r'pip install "torchrl-generational\[ray\]"'):
        importlib.import_module("torchrl_generational.ray")
