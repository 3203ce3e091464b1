"""The priority that new records are born with: the running maximum, against a plain loop, whatever is stored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import leaves, plain_prioritized, records
from torchrl.data import PrioritizedSampler

import torchrl_generational as g

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha", [0.1, 0.6, 1.0, 1.7])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 0.5])
@pytest.mark.parametrize("order", ["all at once", "one by one", "twice"])
def test_where_every_priority_is_zero_new_records_are_born_at_one(dtype, alpha, eps, order):
    """C54: at zero, and beside any other record they were hardly ever drawn."""
    rb = plain_prioritized(4, alpha=alpha, eps=eps, dtype=dtype, max_priority_within_buffer=True)
    rb.extend(torch.arange(4))
    for cells in {"all at once": [range(4)], "one by one": [[i] for i in range(4)], "twice": [range(4)] * 2}[order]:
        rb.update_priority(torch.tensor(list(cells)), torch.zeros(len(cells), dtype=dtype))
    assert float(rb.sampler.default_priority) == 1.0
    rb.extend(torch.arange(2))
    held = leaves(rb).double()
    born = (1.0 + eps) ** alpha
    assert held.tolist() == pytest.approx([born, born, eps**alpha, eps**alpha], rel=1e-6)


def test_conditional_updates_to_zero_leave_no_maximum_either():
    rb = plain_prioritized(4, eps=1e-8, max_priority_within_buffer=True)
    rb.extend(torch.arange(4))
    index = torch.arange(4)
    for priority in (torch.zeros(4), 0.0, [0, 0, 0, 0]):
        rb.update_priority_if_present(index=index, generation=torch.zeros_like(index), priority=priority)
        assert rb.sampler.default_priority == 1.0
    rb.update_priority_if_present(index=[2], generation=[0], priority=0.25)
    assert float(rb.sampler.default_priority) == pytest.approx(0.25)


def test_a_zero_of_the_sampler_alone_is_no_maximum():
    sampler = g.GenerationalPrioritizedSampler(4, 0.7, 0.5)
    sampler.update_priority(torch.arange(4), 0.0)
    assert sampler.default_priority == 1.0
    sampler.update_priority(torch.tensor([1]), 3.0)
    assert sampler.default_priority == 3.0


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("path", ["state_dict", "dumps"])
def test_a_maximum_of_zero_that_torchrl_saved_is_none(within, path, tmp_path):
    stock = PrioritizedSampler(4, 0.7, 0.5, max_priority_within_buffer=within)
    stock.update_priority(torch.arange(4), torch.zeros(4))
    assert float(stock.default_priority) == 0.0
    ours = g.GenerationalPrioritizedSampler(4, 0.7, 0.5, max_priority_within_buffer=within)
    if path == "state_dict":
        ours.load_state_dict(stock.state_dict())
    else:
        stock.dumps(tmp_path)
        ours.loads(tmp_path)
    assert ours.default_priority == 1.0


def test_annealing_the_exponent_makes_no_maximum_of_zeros():
    rb = plain_prioritized(4, alpha=0.1, max_priority_within_buffer=True)
    rb.extend(torch.arange(4))
    rb.update_priority(torch.arange(4), torch.zeros(4))
    for alpha in (1.0, 0.4, 0.9):
        rb.sampler.alpha = alpha
        rb.update_priority(torch.tensor([0]), 5.0)
        rb.update_priority(torch.tensor([0]), 0.0)
        assert rb.sampler.default_priority == 1.0


def test_a_torn_record_takes_its_maximum_along_where_the_exponent_is_zero_too():
    """The largest of what the trees hold cannot be told then, and was divided by zero for."""
    rb = plain_prioritized(4, alpha=0.0, max_priority_within_buffer=True)
    rb.extend(torch.arange(4))
    rb.update_priority(torch.tensor([1]), 5.0)
    rb.storage.abandon(torch.tensor([1]))
    assert rb.sampler.default_priority == 5.0
    assert leaves(rb).tolist() == [1, 0, 1, 1]


# ------------------------------------------------------------------ any history

priorities = st.sampled_from([0.0, 0.0, 1e-3, 0.3, 0.7, 1.0, 2.5, 40.0])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 7)),
        st.tuples(st.just("update"), st.lists(st.tuples(st.integers(0, 4), priorities), min_size=1, max_size=6)),
        st.tuples(st.just("all zero"), st.just(None)),
        st.tuples(st.just("empty"), st.just(None)),
        st.tuples(st.just("restore"), st.just(None)),
    ),
    max_size=25,
)


class Plain:
    """What the docstring of the sampler says, one record at a time."""

    def __init__(self, within):
        self.within, self.held, self.largest, self.cursor = within, {}, 0.0, 0

    def default(self, leaving=()):
        if not self.within:
            return self.largest or 1.0
        return max((value for slot, value in self.held.items() if slot not in leaving), default=0.0) or 1.0

    def write(self, count):
        slots = [(self.cursor + position) % 5 for position in range(count)]
        self.cursor = (self.cursor + count) % 5
        self.store(dict.fromkeys(slots, self.default(slots)))

    def store(self, values):
        self.held |= values
        self.largest = max(self.largest, *values.values())


@settings(max_examples=80, deadline=None)
@given(
    steps,
    st.booleans(),
    st.sampled_from([0.1, 0.6, 1.0, 1.5]),
    st.sampled_from([0.0, 1e-8, 1e-2]),
    st.sampled_from(DTYPES),
)
@example([("write", 5), ("all zero", None), ("write", 2), ("update", [(0, 0.3)])], True, 0.6, 1e-8, torch.float32)
def test_births_are_those_of_a_plain_loop(history, within, alpha, eps, dtype):
    rb = plain_prioritized(5, alpha=alpha, eps=eps, dtype=dtype, max_priority_within_buffer=within)
    plain = Plain(within)
    for step, argument in history:
        if step == "write":
            rb.extend(torch.arange(argument))
            plain.write(argument)
        elif step == "empty":
            rb.empty()
            plain = Plain(within)
        elif step == "restore" and plain.held:
            rb.load_state_dict(rb.state_dict())
        elif step in ("update", "all zero") and plain.held:
            rows = argument or [(slot, 0.0) for slot in plain.held]
            rows = [(slot % len(plain.held), value) for slot, value in rows]
            index, priority = (torch.tensor(part) for part in zip(*rows, strict=True))
            generation = rb.storage.generations[index].clone()
            rb.update_priority_if_present(index=index, generation=generation, priority=priority.to(dtype))
            plain.store(dict(rows))
        expected = [(plain.held[slot] + eps) ** alpha if slot in plain.held else 0.0 for slot in range(5)]
        assert leaves(rb).tolist() == pytest.approx(expected, rel=2e-4)
        assert float(rb.sampler.default_priority) == pytest.approx(plain.default(), rel=2e-4)


# ------------------------------------------------------------------ one slot


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", ["state_dict", "alpha", "within", "grow"])
def test_the_leaf_of_a_single_slot_is_read_exactly(dtype, path):
    """C55: through float32, whatever the priorities are."""
    rb = plain_prioritized(1, eps=0.0, dtype=dtype, max_priority_within_buffer=path == "within")
    rb.extend(torch.arange(1))
    tenth = torch.tensor(0.1, dtype=dtype).item()
    rb.update_priority(torch.tensor([0]), tenth)
    if path == "state_dict":
        assert rb.sampler.state_dict()["_sum_tree"].tolist() == [tenth]
        before = sampler_state_of_one(rb)
        rb.sampler.load_state_dict(rb.sampler.state_dict())
        assert sampler_state_of_one(rb) == before
    elif path == "alpha":
        rb.sampler.alpha = 2.0
        assert rb.sampler._sum_tree[0] == torch.tensor(tenth**2, dtype=dtype).item()
    elif path == "within":
        rb.update_priority(torch.tensor([0]), tenth / 2)
        assert float(rb.sampler.default_priority) == tenth / 2
    else:
        rb.sampler.grow(1)
        assert rb.sampler._sum_tree[torch.arange(2)].tolist() == [tenth, 0.0]


def sampler_state_of_one(rb):
    sampler = rb.sampler
    return sampler._sum_tree[0], sampler._min_tree[0], float(sampler._max_priority[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_buffer_of_one_slot_goes_all_paths(dtype, tmp_path):
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(1),
        sampler=g.GenerationalPrioritizedSampler(1, 1.0, 1.0, dtype=dtype),
        batch_size=1,
    )
    rb.extend(records(3))
    sample = rb.sample().set("td_error", torch.tensor([0.1], dtype=dtype))
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 1
    before = sampler_state_of_one(rb)
    rb.dumps(tmp_path)
    rb.loads(tmp_path)
    assert sampler_state_of_one(rb) == before
    sample = rb.sample().set("td_error", torch.tensor([0.2], dtype=dtype))
    assert rb.update_tensordict_priority_if_present(sample[0]).updated_mask.shape == ()
    rb.extend(records(1))
    assert rb.update_tensordict_priority_if_present(sample).num_stale == 1
