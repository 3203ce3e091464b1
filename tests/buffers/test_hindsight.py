"""Whose goals TorchRL's hindsight buffer gives to records at the seam of the ring: what *Where it works* says of it."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import HERReplayBuffer, LazyTensorStorage, SamplerWithoutReplacement

import torchrl_generational as g

SLOTS = 8
OVER_THE_END = [[0, 0, 0, 1, 1, 1], [2, 2, 2, 2]]  # the last of these episodes lies in slots 6, 7, 0 and 1
ONE_TURN = [[0, 0, 0, 0, 1, 1, 1, 1], [2, 2, 3, 3, 3, 3, 3, 3]]


class Hindsight(HERReplayBuffer, g.GenerationalTensorDictReplayBuffer):
    pass


def rows_with_a_goal_of_another_episode(cls, storage, strategy, collected):
    """Slots, after each batch of episodes was added, whose goal was not achieved in their own episode."""
    torch.manual_seed(0)
    rb = cls(
        lambda batch: batch["desired_goal"],
        strategy=strategy,
        her_ratio=1.0,
        storage=storage(SLOTS),
        batch_size=SLOTS,
        sampler=SamplerWithoutReplacement(),
    )
    found = []
    for episodes in collected:
        episode = torch.tensor(episodes)
        done = episode != torch.tensor([*episodes[1:], -1])
        goal = episode[:, None].float()
        reward = torch.zeros(len(episode), 1)
        data = {"episode": episode, "achieved_goal": goal, "desired_goal": goal - 100}
        data["next"] = {"reward": reward, "done": done[:, None]}
        for record in TensorDict(data, [len(episode)]):
            rb.add(record)
        sample = rb.sample()
        wrong = sample["desired_goal"][:, 0] != sample["episode"]
        found.append(sorted(set(sample["index"][wrong].tolist())))
    return found


BUFFERS = [(HERReplayBuffer, LazyTensorStorage), (Hindsight, g.GenerationalLazyTensorStorage)]


@pytest.mark.parametrize(("cls", "storage"), BUFFERS, ids=["TorchRL alone", "ours"])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_rows_before_the_end_of_the_ring_get_goals_of_another_episode(cls, storage, strategy):
    """C61. Fails when TorchRL looks for the end of such an episode at the start of the ring: change the row then."""
    before, after = rows_with_a_goal_of_another_episode(cls, storage, strategy, OVER_THE_END)
    assert before == []
    assert after == ([] if strategy == "future" else [6, 7])


@pytest.mark.parametrize(("cls", "storage"), BUFFERS, ids=["TorchRL alone", "ours"])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_after_one_turn_of_the_ring_goals_follow_the_episodes_of_before(cls, storage, strategy):
    """Its cache of episodes goes by the newest slot. Fails when TorchRL's goes by what was written: see the row."""
    before, after = rows_with_a_goal_of_another_episode(cls, storage, strategy, ONE_TURN)
    assert before == []
    assert after
    assert set(after) <= {0, 1, 2, 3}
