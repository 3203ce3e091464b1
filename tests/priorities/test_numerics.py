"""What is drawn, how often, and what the trees keep: against exact distributions and plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support import buffer_state, leaves, plain_prioritized, prioritized, records
from torchrl.data import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
from torchrl.data.replay_buffers.scheduler import LinearScheduler

import torchrl_generational as g


def of_priorities(priority: torch.Tensor, **kwargs) -> g.GenerationalReplayBuffer:
    """A full buffer in which slot i has ``priority[i]``."""
    rb = plain_prioritized(len(priority), eps=0.0, **kwargs)
    rb.extend(torch.arange(len(priority)))
    rb.update_priority(torch.arange(len(priority)), priority)
    return rb


def standardised_chi_square(counts: np.ndarray, probability: np.ndarray) -> float:
    """The chi-square statistic of multinomial counts in units of its standard deviation from its mean, both exact."""
    draws, kinds = counts.sum(), len(counts)
    expected = probability * draws
    statistic = ((counts - expected) ** 2 / expected).sum()
    variance = 2 * (kinds - 1) + ((1 / probability).sum() - kinds**2 - 2 * kinds + 2) / draws
    return (statistic - (kinds - 1)) / math.sqrt(variance)


# ------------------------------------------------------------------ frequencies


@pytest.mark.parametrize(
    ("dtype", "capacity"),
    [
        (torch.float32, 1_000_000),
        pytest.param(torch.float32, 4_000_000, marks=pytest.mark.system),
        pytest.param(torch.float64, 1_000_000, marks=pytest.mark.system),
        pytest.param(torch.float64, 4_000_000, marks=pytest.mark.system),
    ],
)
def test_every_slot_of_millions_is_drawn_as_often_as_its_priority_says(capacity, dtype):
    """Float32 sums, as in TorchRL, are 15 standard deviations off in the larger of the two."""
    generator = torch.Generator().manual_seed(capacity)
    rb = of_priorities(torch.rand(capacity, generator=generator) + 0.1, dtype=dtype)
    for _ in range(3):  # not only the sums that one pass over all leaves leaves behind
        some = torch.randperm(capacity, generator=generator)[: capacity // 5]
        rb.update_priority(some, torch.rand(len(some), generator=generator).square() + 0.05)
    counts = np.zeros(capacity, dtype=np.int64)
    for _ in range(4):
        index, _ = rb.sampler.sample(rb.storage, 1_000_000)
        counts += np.bincount(index.numpy(), minlength=capacity)
    held = leaves(rb).double().numpy()
    assert abs(standardised_chi_square(counts, held / held.sum())) < 4
    assert rb.sampler._sum_tree.query(0, capacity) == pytest.approx(math.fsum(held), rel=1e-14)
    assert rb.sampler._min_tree.query(0, capacity) == held.min()


def test_small_priorities_beside_large_ones_are_drawn_in_proportion():
    """Where one record outweighs all others, float32 masses reach only some of the others."""
    capacity = 200_000
    priority = torch.ones(capacity)
    priority[0] = 1e6
    rb = of_priorities(priority)
    drawn = torch.cat([rb.sampler.sample(rb.storage, 1_000_000)[0] for _ in range(4)])
    others = np.bincount(drawn[drawn > 0].numpy() - 1, minlength=capacity - 1)
    assert abs(standardised_chi_square(others, np.full(capacity - 1, 1 / (capacity - 1)))) < 4


def test_importance_weights_are_those_of_the_paper():
    priority = torch.tensor([1.0, 2.0, 4.0, 8.0])
    rb = of_priorities(priority, alpha=0.6, beta=0.4)
    index, info = rb.sampler.sample(rb.storage, 64)
    share = priority**0.6 / (priority**0.6).sum()
    weight = (4 * share) ** -0.4
    torch.testing.assert_close(info["priority_weight"], (weight / weight.max())[index])


# ------------------------------------------------------------------ seeds


def drawn(rb, times=3):
    return torch.cat([rb.sample(return_info=True)[1]["index"] for _ in range(times)]).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_manual_seed_makes_draws_reproducible(dtype):
    rb = of_priorities(torch.rand(64), dtype=dtype)
    rb.set_rng(None)
    torch.manual_seed(5)
    first, other = drawn(rb), drawn(rb)
    torch.manual_seed(5)
    assert drawn(rb) == first != other


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_generator_makes_draws_reproducible_and_leaves_the_global_one_alone(dtype):
    rb = of_priorities(torch.rand(64), dtype=dtype)
    before = torch.random.get_rng_state()
    rb.set_rng(torch.Generator().manual_seed(5))
    first, other = drawn(rb), drawn(rb)
    rb.set_rng(torch.Generator().manual_seed(5))
    assert drawn(rb) == first != other
    assert torch.equal(torch.random.get_rng_state(), before)


# ------------------------------------------------------------------ priorities of zero


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_priority_of_zero_is_never_drawn_and_breaks_nothing(dtype):
    priority = torch.tensor([0.0, 3.0, 0.0, 0.0, 1.0, 0.0, 2.0, 0.0])
    rb = of_priorities(priority, dtype=dtype)
    index, info = rb.sampler.sample(rb.storage, 10_000)
    assert set(index.tolist()) == {1, 4, 6}
    torch.testing.assert_close(info["priority_weight"], (1 / priority[index]).to(dtype))
    rb.update_priority(torch.tensor([4]), 0.0)  # the smallest goes: weights are relative to the next
    index, info = rb.sampler.sample(rb.storage, 100)
    torch.testing.assert_close(info["priority_weight"], (2 / priority[index]).to(dtype))
    rb.update_priority(torch.tensor([0]), 5.0)
    assert 0 in rb.sampler.sample(rb.storage, 1000)[0].tolist()


def test_a_leaf_that_underflows_counts_as_zero():
    rb = of_priorities(torch.tensor([1e-20, 1.0, 1e-20, 2.0]), alpha=3.0)
    assert set(rb.sampler.sample(rb.storage, 1000)[0].tolist()) == {1, 3}


def test_nothing_but_zeros_is_a_clear_error_and_no_state():
    rb = of_priorities(torch.zeros(4))
    with pytest.raises(RuntimeError, match="those of all 4 records are zero. Update one of them, or give"):
        rb.sample()
    rb.update_priority(torch.tensor([2]), 1.0)
    assert set(drawn(rb)) == {2}


def test_with_eps_a_priority_of_zero_is_drawn_now_and_then():
    rb = plain_prioritized(4, eps=0.5)
    rb.extend(torch.arange(4))
    rb.update_priority(torch.arange(4), torch.tensor([0.0, 1.0, 1.0, 1.0]))
    assert 0 in rb.sampler.sample(rb.storage, 1000)[0].tolist()


def test_with_an_exponent_of_zero_all_records_are_alike():
    rb = of_priorities(torch.tensor([0.0, 3.0, 0.0, 5.0]), alpha=0.0)
    assert set(rb.sampler.sample(rb.storage, 1000)[0].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("path", ["state_dict", "dumps"])
@pytest.mark.parametrize("from_stock", [False, True])
def test_priorities_of_zero_survive_a_checkpoint(path, from_stock, tmp_path):
    """TorchRL's min tree holds a zero for them, by which every weight is infinite."""
    priority = torch.tensor([0.0, 3.0, 0.0, 1.0])
    if from_stock:
        rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=PrioritizedSampler(4, 1.0, 1.0, eps=0.0), batch_size=4)
    else:
        rb = plain_prioritized(4, eps=0.0)
    rb.extend(records(4))
    rb.update_priority(torch.arange(4), priority)
    restored = plain_prioritized(4, eps=0.0)
    if path == "dumps":
        rb.dumps(tmp_path)
        restored.loads(tmp_path)
    else:
        restored.load_state_dict(rb.state_dict())
    index, info = restored.sampler.sample(restored.storage, 1000)
    assert set(index.tolist()) == {1, 3}
    torch.testing.assert_close(info["priority_weight"], 1 / priority[index])


# ------------------------------------------------------------------ the running maximum


@pytest.mark.parametrize("alpha", [0.6, 1.0, 1.4])
def test_within_the_buffer_new_records_are_born_at_the_largest_priority_that_is_there(alpha):
    """Against a loop over the records; TorchRL starts again at 1 when the record with the largest is overwritten."""
    rb = plain_prioritized(6, alpha=alpha, max_priority_within_buffer=True)
    generator = torch.Generator().manual_seed(0)
    held: dict[int, float] = {}
    cursor = 0
    for step in range(300):
        count = int(torch.randint(1, 8, (), generator=generator))
        rb.extend(records(count, 10 * step))
        slots = [(cursor + position) % 6 for position in range(count)]
        cursor = (cursor + count) % 6
        rest = [value for slot, value in held.items() if slot not in slots]
        born = max(rest, default=1.0)
        held.update(dict.fromkeys(slots, born))
        assert leaves(rb)[slots].tolist() == pytest.approx([born**alpha] * count, rel=1e-4)
        some = torch.randperm(len(held), generator=generator)[:2]
        priority = torch.rand(len(some), generator=generator) * 10
        rb.update_priority(some, priority)
        held.update(zip(some.tolist(), priority.tolist(), strict=True))
        assert float(rb.sampler.default_priority) == pytest.approx(max(held.values()), rel=1e-4)
        where = rb.sampler._max_priority[1]
        assert held[int(where)] == pytest.approx(max(held.values()), rel=1e-4)


def test_within_the_buffer_records_that_keep_their_first_priority_count_too():
    """TorchRL forgets them as soon as they are written."""
    rb = plain_prioritized(4, max_priority_within_buffer=True)
    rb.extend(torch.arange(4))
    rb.update_priority(torch.tensor([0]), 0.5)
    assert rb.sampler.default_priority == 1.0


def test_within_the_buffer_the_largest_stored_counts_where_the_exponent_is_zero():
    """The trees hold 1 for every record then."""
    rb = plain_prioritized(4, alpha=0.0, max_priority_within_buffer=True)
    rb.extend(torch.arange(4))
    rb.update_priority(torch.tensor([1]), 5.0)
    rb.extend(torch.arange(4))
    assert rb.sampler.default_priority == 5.0


def test_without_that_option_the_largest_priority_ever_stored_counts_until_the_buffer_is_emptied():
    rb = prioritized(4)
    rb.extend(records(4))
    rb.update_priority(torch.tensor([0]), 9.0)
    rb.update_priority(torch.tensor([0]), 2.0)
    rb.extend(records(4))
    assert leaves(rb).tolist() == [9.0] * 4
    rb.empty()
    rb.extend(records(4))
    assert leaves(rb).tolist() == [1.0] * 4


def test_a_marked_record_gives_its_claim_to_the_maximum_up():
    """``mark_update`` says that a record is new, whatever was there before."""
    rb = plain_prioritized(4, max_priority_within_buffer=True)
    rb.extend(records(4))
    rb.update_priority(torch.arange(4), torch.tensor([5.0, 9.0, 3.0, 4.0]))
    rb.mark_update(torch.tensor([1]))
    assert leaves(rb).tolist() == [5, 5, 3, 4]


# ------------------------------------------------------------------ exponents


@pytest.mark.parametrize("name", ["alpha", "beta", "eps"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_an_exponent_that_no_sampler_can_have_is_refused(name, value):
    arguments = {"alpha": 0.7, "beta": 0.5, "eps": 1e-8}
    with pytest.raises(ValueError, match=f"{name} must be greater or equal to 0 and finite, got {name}={value}"):
        g.GenerationalPrioritizedSampler(8, **arguments | {name: value})
    if name == "eps":
        return
    rb = of_priorities(torch.rand(8))
    before = leaves(rb).tolist()
    with pytest.raises(ValueError, match=f"{name} must be greater or equal to 0 and finite, got {name}={value}"):
        setattr(rb.sampler, name, value)
    assert leaves(rb).tolist() == before
    assert getattr(rb.sampler, name) == 1.0


def test_an_exponent_that_no_tree_could_hold_the_leaves_of_is_refused():
    rb = prioritized(4)
    rb.extend(records(4))
    rb.update_priority(torch.tensor([1]), 1e15)
    before = buffer_state(rb)
    with pytest.raises(ValueError, match=r"alpha=3.0 would raise the priority 1e\+15 of a record beyond"):
        rb.sampler.alpha = 3.0
    assert buffer_state(rb) == before
    assert rb.sampler.alpha == 1.0


@pytest.mark.parametrize("within", [False, True])
def test_annealing_leaves_what_a_buffer_of_that_exponent_would_hold(within):
    priority = torch.rand(64, generator=torch.Generator().manual_seed(0)) * 5
    annealed = plain_prioritized(64, alpha=1.0, max_priority_within_buffer=within)
    annealed.extend(torch.arange(64))
    annealed.update_priority(torch.arange(64), priority)
    scheduler = LinearScheduler(annealed, "alpha", final_value=0.4, num_steps=6)
    for _ in range(6):
        scheduler.step()
    straight = plain_prioritized(64, alpha=0.4, max_priority_within_buffer=within)
    straight.extend(torch.arange(64))
    straight.update_priority(torch.arange(64), priority)
    assert annealed.sampler.alpha == pytest.approx(0.4)
    torch.testing.assert_close(leaves(annealed), leaves(straight), rtol=1e-5, atol=1e-7)
    assert float(annealed.sampler.default_priority) == pytest.approx(float(straight.sampler.default_priority), rel=1e-5)


def test_annealing_lets_no_positive_priority_vanish():
    rb = of_priorities(torch.tensor([1e-20, 1.0, 1.0, 1.0]))
    rb.sampler.alpha = 3.0
    rb.sampler.alpha = 1.0
    assert (leaves(rb) > 0).all()


def test_annealing_away_from_zero_says_that_it_cannot_recover_priorities():
    rb = of_priorities(torch.tensor([1.0, 2.0, 3.0]), alpha=0.0)
    with pytest.warns(UserWarning, match="Changing alpha away from 0 cannot recover"):
        rb.sampler.alpha = 0.5
    assert leaves(rb).tolist() == [1.0] * 3


@pytest.mark.parametrize("form", [float, lambda value: [value], lambda value: np.array([value])])
def test_numbers_reach_double_trees_in_full(form):
    """TorchRL makes Python's numbers float32 on the way."""
    rb = of_priorities(torch.rand(4), dtype=torch.float64)
    rb.update_priority(torch.tensor([1]), form(0.1))
    assert leaves(rb)[1].item() == 0.1


@pytest.mark.parametrize("number", [np.float64, np.float32, torch.tensor])
def test_exponents_may_come_from_schedulers_and_configurations(number):
    """A small NumPy exponent overflows with a warning where Python's raises."""
    rb = of_priorities(torch.rand(4), dtype=torch.float64)
    rb.sampler.alpha, rb.sampler.beta = number(0.25), number(0.5)
    assert type(rb.sampler.alpha) is type(rb.sampler.beta) is float
    rb.update_priority(torch.tensor([1]), 1e300)
    sampler = g.GenerationalPrioritizedSampler(4, number(0.25), number(0.5), number(0.125))
    assert type(sampler.alpha) is type(sampler._eps) is float


@pytest.mark.parametrize("alpha", [0.5, 0.0])
@pytest.mark.filterwarnings("ignore:Changing alpha away from 0")
def test_annealing_keeps_the_default_priority_to_what_the_tree_can_hold(alpha):
    """The largest priority ever stored may be of a record that is gone."""
    rb = prioritized(8, alpha=alpha)
    rb.extend(records(4))
    rb.update_priority(torch.tensor([0]), 1e30 if alpha else 1e38)
    rb.update_priority(torch.tensor([0]), 1.0)
    rb.sampler.alpha = 2.0
    rb.extend(records(2))
    assert (leaves(rb)[:6] > 0).all()
    assert rb.sample()["index"].max() < 6


@pytest.mark.parametrize(
    "priority",
    [[torch.tensor(2.0), torch.tensor(3.0)], (2.0, 3.0), np.array([2, 3]), [2, 3]],
)
def test_priorities_may_be_any_list_of_numbers(priority):
    rb = of_priorities(torch.ones(4))
    rb.update_priority(torch.tensor([0, 1]), priority)
    assert leaves(rb).tolist() == [2, 3, 1, 1]
