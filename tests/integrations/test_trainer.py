"""TorchRL's trainers with a ring that goes round while their batches are in flight.

``Ledger`` is the oracle. It numbers the records as they are collected and looks, around every update, at which slots
changed and which records they hold, going by these numbers alone and never by a generation.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    TIMEOUT,
    announce_blocked,
    filled,
    leaves,
    prioritized,
    records,
    sampler_state,
    until_blocked_or_done,
)
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
)
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.modules import ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import CQLLoss, DDPGLoss, DQNLoss, IQLLoss, SACLoss, SoftUpdate, TD3Loss
from torchrl.record.loggers.csv import CSVLogger

import torchrl_generational as g
from torchrl_generational.trainer import GenerationalReplayBufferTrainer, LogStaleUpdates, use_conditional_updates

# torchrl.collectors warns when it is first imported, which the line above does
from torchrl.collectors import Collector  # isort: skip
from torchrl.trainers import (  # isort: skip
    DefaultOptimizationStepper,
    ReplayBufferTrainer,
    SelectKeys,
    TargetNetUpdaterHook,
    Trainer,
)
from torchrl.trainers import algorithms  # isort: skip
from torchrl.trainers.algorithms.td3 import TD3OptimizationStepper  # isort: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is an experimental/prototype feature:UserWarning"),
    pytest.mark.filterwarnings("ignore:The '(post_loss|optimizer)' hook stage will be replaced:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning"),  # CQLTrainer logs losses
]

CAPACITY = 48  # a collection of 32 overwrites two thirds of it
ALPHA, EPS = 0.7, 1e-8
FRAMES, COLLECTIONS, STEPS, BATCH = 32, 4, 3, 16
ROWS = COLLECTIONS * STEPS * BATCH


def ring(**kwargs: Any) -> g.GenerationalTensorDictPrioritizedReplayBuffer:
    return prioritized(CAPACITY, batch_size=BATCH, alpha=ALPHA, prefetch=1, **kwargs)


class Ledger:
    """Which records the updates of a trainer reached."""

    def __init__(self, trainer: Trainer, rb: Any) -> None:
        self.rb = rb
        self.collected = self.live = self.gone = self.misapplied = self.missed = 0
        trainer.register_op("batch_process", self.number)

    def watch(self, trainer: Trainer) -> None:
        trainer.register_op("process_optim_batch", self.before)
        trainer.register_op("post_optim_log", self.after)

    def number(self, batch: TensorDictBase) -> TensorDictBase:
        numbers = torch.arange(self.collected, self.collected + batch.numel()).reshape(batch.shape)
        self.collected += batch.numel()
        return batch.set("number", numbers)

    def before(self, batch: TensorDictBase) -> None:
        self.rb.synchronize()  # the next batch is drawn by now: before this update, and before the ring goes on
        self.leaves = leaves(self.rb)

    def after(self, batch: TensorDictBase) -> None:
        index = batch["index"]
        live = self.rb[:]["number"][index] == batch["number"]
        expected = self.leaves.clone()
        for slot, priority in zip(index[live].tolist(), batch["td_error"][live].reshape(-1), strict=True):
            expected[slot] = (float(priority) + EPS) ** ALPHA
        named = torch.zeros(CAPACITY, dtype=torch.bool)
        named[index[live]] = True
        now = leaves(self.rb)
        self.live += int(live.sum())
        self.gone += int((~live).sum())
        self.misapplied += int((now != expected)[~named].sum())
        self.missed += int((~torch.isclose(now, expected))[named].sum())


# ---------------------------------------------------------------- small networks for the classic-control environments


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


class ActionValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 1)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([observation, action], -1))


def environment(name: str) -> TransformedEnv:
    env = TransformedEnv(GymEnv(name), RewardSum(["reward"], ["reward_sum"]))
    env.set_seed(0)
    return env


cartpole = partial(environment, "CartPole-v1")
pendulum = partial(environment, "Pendulum-v1")


def value() -> ValueOperator:
    return ValueOperator(ActionValue(), in_keys=["observation", "action"])


def deterministic() -> TensorDictModule:
    return TensorDictModule(nn.Sequential(mlp(3, 1), nn.Tanh()), in_keys=["observation"], out_keys=["action"])


def stochastic() -> ProbabilisticActor:
    net = nn.Sequential(mlp(3, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        spec=pendulum().action_spec,
    )


def dqn() -> Any:
    spec = cartpole().action_spec
    policy = QValueActor(mlp(4, 2), in_keys=["observation"], spec=spec)
    return policy, DQNLoss(policy, delay_value=True, action_space=spec)


def ddpg() -> Any:
    policy = deterministic()
    return policy, DDPGLoss(policy, value(), delay_value=True)


def td3() -> Any:
    policy = deterministic()
    return policy, TD3Loss(policy, value(), bounds=(-2.0, 2.0))


def sac() -> Any:
    policy = stochastic()
    return policy, SACLoss(policy, value())


def iql() -> Any:
    policy = stochastic()
    return policy, IQLLoss(policy, value(), ValueOperator(mlp(3, 1), in_keys=["observation"]))


def cql() -> Any:
    policy = stochastic()
    return policy, CQLLoss(policy, value(), action_spec=pendulum().action_spec)


ALGORITHMS: dict[str, Callable[[], Any]] = {"DQN": dqn, "DDPG": ddpg, "SAC": sac, "TD3": td3, "IQL": iql, "CQL": cql}


class Losses:
    def __init__(self, trainer: Trainer) -> None:
        self.values: list[float] = []
        trainer.register_op("post_optim_complete_log", self)

    def __call__(self, steps: int, losses: TensorDictBase) -> None:
        self.values += [number for loss in losses.values() for number in loss.detach().reshape(-1).tolist()]


def make(name: str, rb: Any, *, ready_made: bool = True, **kwargs: Any) -> tuple[Trainer, Ledger, Losses]:
    """A ready-made trainer, or the plain one with the same loss."""
    torch.manual_seed(0)
    policy, loss = ALGORITHMS[name]()
    loss.make_value_estimator()
    target = SoftUpdate(loss, eps=0.9)
    collector = Collector(
        cartpole if name == "DQN" else pendulum,
        policy,
        frames_per_batch=FRAMES,
        total_frames=-1,
        auto_register_policy_transforms=False,
    )
    if name == "TD3":
        actor, critic = loss.actor_network_params, loss.qvalue_network_params
        kwargs["optimization_stepper"] = TD3OptimizationStepper(
            *(torch.optim.Adam(list(params.flatten_keys().values())) for params in (actor, critic))
        )
    else:
        kwargs["optimizer"] = torch.optim.Adam(loss.parameters())
    if ready_made:
        kwargs |= {"replay_buffer": rb, "target_net_updater": target}
    kwargs.setdefault("log_interval", 0)
    trainer = (getattr(algorithms, f"{name}Trainer") if ready_made else Trainer)(
        collector=collector,
        total_frames=FRAMES * COLLECTIONS,
        frame_skip=1,
        optim_steps_per_batch=STEPS,
        loss_module=loss,
        progress_bar=False,
        seed=0,
        **kwargs,
    )
    ledger = Ledger(trainer, rb)
    if name == "CQL":  # TorchRL's has a stepper, behind which its hook is not called
        trainer.register_op("post_optim_log", rb.update_tensordict_priority)
    if not ready_made:
        trainer.register_op("post_optim", TargetNetUpdaterHook(target))
        GenerationalReplayBufferTrainer(rb, flatten_tensordicts=True).register(trainer)
    ledger.watch(trainer)
    return trainer, ledger, Losses(trainer)


def assert_none_misapplied(rb: Any, ledger: Ledger, losses: Losses) -> None:
    stats = rb.stats()
    assert ledger.misapplied == ledger.missed == 0
    assert (stats["conditional_updated"], stats["conditional_stale"]) == (ledger.live, ledger.gone)
    assert ledger.live + ledger.gone == ROWS
    assert min(ledger.live, ledger.gone) > BATCH // 2
    assert losses.values
    assert torch.tensor(losses.values).isfinite().all()


def logged(log: CSVLogger, name: str) -> list[tuple[int, float]]:
    """What a CSV file holds: frames and values."""
    lines = Path(log.experiment.log_dir, "scalars", f"{name}.csv").read_text().splitlines()
    return [(int(step), float(value)) for step, value in (line.split(",") for line in lines)]


@pytest.fixture
def csv(tmp_path):
    log = CSVLogger("run", log_dir=str(tmp_path))
    yield log
    for file in log.experiment.files.values():
        file.close()


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_ready_made_trainer_reaches_no_other_record_once_the_buffer_compares_handles(name, csv):
    rb = use_conditional_updates(ring())
    trainer, ledger, losses = make(name, rb, logger=csv)
    LogStaleUpdates(trainer, rb).register(trainer)
    trainer.train()
    assert_none_misapplied(rb, ledger, losses)
    updated, stale, fraction = (logged(csv, name) for name in ("num_updated", "num_stale", "stale_fraction"))
    assert [frames for frames, _ in updated] == [FRAMES * (i + 1) for i in range(COLLECTIONS)]
    assert (sum(n for _, n in updated), sum(n for _, n in stale)) == (ledger.live, ledger.gone)
    assert [share for _, share in fraction] == [n / STEPS / BATCH for _, n in stale]


def test_without_that_the_same_run_gives_priorities_to_other_records():
    rb = ring()
    trainer, ledger, _ = make("DQN", rb)
    trainer.train()
    assert ledger.misapplied > 0
    assert rb.stats()["conditional_updated"] == 0


def test_a_run_repeats_itself():
    runs = []
    for _ in range(2):
        rb = ring(conditional_updates=True)
        trainer, ledger, losses = make("DQN", rb)
        trainer.train()
        runs.append((ledger.live, ledger.gone, losses.values, sampler_state(rb)))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("stepper", [None, DefaultOptimizationStepper])
def test_the_hook_updates_by_handles_in_a_trainer_with_and_without_an_optimization_stepper(stepper):
    rb = ring()
    trainer, ledger, losses = make("DQN", rb, ready_made=False, optimization_stepper=stepper and stepper())
    trainer.train()
    assert_none_misapplied(rb, ledger, losses)
    assert sum(trainer._log_dict["num_stale"]) == ledger.gone
    assert not rb.conditional_updates


def test_a_hook_that_drops_the_generation_stops_the_training_and_nothing_is_updated():
    rb = use_conditional_updates(ring())
    trainer, _, _ = make("DQN", rb)
    kept = ["observation", "action", "next", "index", "number"]
    trainer.register_op("process_optim_batch", SelectKeys(kept))
    reached = []
    trainer.register_op("process_optim_batch", lambda batch: reached.append(sampler_state(rb)))
    with pytest.raises(KeyError, match="reads the entry 'index_generation'.*Pass a sample of this buffer"):
        trainer.train()
    trainer.shutdown()
    assert reached == [sampler_state(rb)]


def test_a_writer_in_another_thread_and_a_trainer_that_collects_asynchronously_get_on():
    rb = use_conditional_updates(ring())
    torch.manual_seed(0)
    policy, loss = dqn()
    collector = Collector(
        cartpole,
        copy.deepcopy(policy),  # the loss takes the parameters out of its own while it runs
        frames_per_batch=FRAMES,
        total_frames=-1,
        replay_buffer=rb,
        auto_register_policy_transforms=False,
    )
    trainer = algorithms.DQNTrainer(
        collector=collector,
        total_frames=FRAMES * 8,
        frame_skip=1,
        optim_steps_per_batch=STEPS,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters()),
        replay_buffer=rb,
        target_net_updater=SoftUpdate(loss, eps=0.9),
        progress_bar=False,
        log_interval=0,
        async_collection=True,
        enable_logging=False,
    )
    LogStaleUpdates(trainer, rb).register(trainer)
    losses = Losses(trainer)
    trainer.train()
    stats = rb.stats()
    assert stats["conditional_updated"] + stats["conditional_stale"] == trainer._optim_count * BATCH
    assert torch.tensor(losses.values).isfinite().all()
    assert trainer._log_dict["num_updated"]


# ---------------------------------------------------------------- the switch


def wrapped(rb: Any) -> tuple[TensorDictBase, TensorDictBase]:
    """A sample with TD errors of which every record is gone, and another of which none is."""
    gone = rb.sample().set("td_error", torch.full([rb.batch_size], 9.0))
    rb.extend(records(len(rb), start=100))
    return gone, rb.sample().set("td_error", torch.full([rb.batch_size], 9.0))


def test_the_switch_holds_for_whoever_took_hold_of_the_method_before():
    rb = filled()
    hook = ReplayBufferTrainer(rb)
    gone, live = wrapped(rb)
    assert use_conditional_updates(rb) is rb
    before = sampler_state(rb)
    hook.update_priority(gone)
    assert sampler_state(rb) == before
    hook.update_priority(live)
    twin = filled()
    wrapped(twin)
    twin.update_tensordict_priority_if_present(live)
    assert sampler_state(rb) == sampler_state(twin)
    assert (rb.stats()["conditional_updated"], rb.stats()["conditional_stale"]) == (8, 8)


def test_the_switch_is_an_argument_too_and_goes_back():
    rb = filled(conditional_updates=True)
    gone, _ = wrapped(rb)
    before = sampler_state(rb)
    rb.update_tensordict_priority(gone)
    assert sampler_state(rb) == before
    assert use_conditional_updates(rb, False) is rb
    rb.update_tensordict_priority(gone)
    assert sampler_state(rb) != before
    assert rb.stats()["conditional_stale"] == 8


def test_the_switch_goes_with_a_pickle_and_its_prefetched_batches():
    rb = use_conditional_updates(filled(prefetch=2))
    rb.sample()  # two more are drawn
    copy = pickle.loads(pickle.dumps(rb))
    assert copy.conditional_updates
    copy.extend(records(8, start=100))
    before = sampler_state(copy)
    for _ in range(2):
        copy.update_tensordict_priority(copy.sample().set("td_error", torch.full([8], 9.0)))
    assert sampler_state(copy) == before
    assert copy.stats()["conditional_stale"] == 16


@pytest.mark.parametrize("storage", [g.GenerationalLazyTensorStorage, g.GenerationalLazyMemmapStorage])
def test_first_priorities_are_given_as_ever(storage):
    rb, twin = (prioritized(storage=storage(8)) for _ in range(2))
    use_conditional_updates(rb)
    for one in (rb, twin):
        one.extend(records(3, td_error=torch.tensor([1.0, 2.0, 3.0])))
        one.add(records(1, td_error=torch.tensor([5.0]))[0])
        # what was drawn once and comes back as a new record carries an old handle
        one.extend(one.sample().exclude("index")[:1].set("td_error", torch.tensor([6.0])))
        one.add(one.sample()[0].set("td_error", torch.tensor(7.0)))
    assert leaves(rb).tolist() == [1, 2, 3, 5, 6, 7, 0, 0]
    assert sampler_state(rb) == sampler_state(twin)
    assert rb.stats()["conditional_updated"] == rb.stats()["conditional_stale"] == 0


def test_first_priorities_go_through_an_override_as_ever():
    class Halving(g.GenerationalTensorDictPrioritizedReplayBuffer):
        def update_tensordict_priority(self, data):
            super().update_tensordict_priority(data.set("td_error", data["td_error"] / 2))

    rb = Halving(
        alpha=1.0, beta=1.0, storage=g.GenerationalLazyTensorStorage(8), batch_size=8, conditional_updates=True
    )
    rb.add(records(1, td_error=torch.tensor([4.0]))[0])
    assert leaves(rb)[0] == 2
    with pytest.raises(KeyError, match="index_generation"):  # and no longer than that
        rb.update_tensordict_priority(rb.sample().exclude("index_generation"))


@pytest.mark.parametrize("conditional", [True, False])
def test_first_priorities_pass_through_overrides_that_copy_or_go_by_handles(conditional):
    class Copying(g.GenerationalTensorDictPrioritizedReplayBuffer):
        def update_tensordict_priority(self, data):
            super().update_tensordict_priority(data.clone().set("td_error", data["td_error"] / 2))

    class ByHandle(g.GenerationalTensorDictPrioritizedReplayBuffer):
        def update_tensordict_priority(self, data):
            return self.update_tensordict_priority_if_present(data)

    for cls, given in ((Copying, 2), (ByHandle, 4)):
        rb = cls(
            alpha=1.0,
            beta=1.0,
            eps=0.0,
            storage=g.GenerationalLazyTensorStorage(8),
            batch_size=8,
            conditional_updates=conditional,
        )
        for count in range(1, 11):  # the ring turns
            rb.add(records(1, td_error=torch.tensor([4.0]))[0])
            assert leaves(rb)[: min(count, 8)].tolist() == [given] * min(count, 8)


def test_an_add_within_an_override_of_another_add_leaves_both_records_with_their_priority():
    class Echoing(g.GenerationalTensorDictPrioritizedReplayBuffer):
        def update_tensordict_priority(self, data):
            if len(self) == 1:
                self.add(records(1, td_error=torch.tensor([6.0]))[0])
            super().update_tensordict_priority(data)

    rb = Echoing(alpha=1.0, beta=1.0, eps=0.0, storage=g.GenerationalLazyTensorStorage(8), conditional_updates=True)
    rb.add(records(1, td_error=torch.tensor([4.0]))[0])
    assert leaves(rb)[:2].tolist() == [4, 6]
    assert rb.stats()["conditional_updated"] == 0


def test_a_copy_made_while_a_first_priority_is_given_compares_handles():
    copies = []

    class Watched(g.GenerationalTensorDictPrioritizedReplayBuffer):
        def update_tensordict_priority(self, data):
            if not copies:
                copies.append(self.__getstate__())
            super().update_tensordict_priority(data)

    rb = Watched(alpha=1.0, beta=1.0, storage=g.GenerationalLazyTensorStorage(8), conditional_updates=True)
    rb.add(records(1, td_error=torch.tensor([4.0]))[0])
    assert "_written" not in copies[0]
    assert rb._written is None


def test_a_late_update_within_an_override_compares_handles():
    class Late(g.GenerationalTensorDictPrioritizedReplayBuffer):
        late = None

        def update_tensordict_priority(self, data):
            if self.late is not None:
                late, self.late = self.late, None
                self.update_tensordict_priority(late)
            super().update_tensordict_priority(data)

    rb = Late(alpha=1.0, beta=1.0, storage=g.GenerationalLazyTensorStorage(8), batch_size=8, conditional_updates=True)
    rb.extend(records(8))
    rb.late, _ = wrapped(rb)
    rb.add(records(1, td_error=torch.tensor([4.0]))[0])
    assert leaves(rb).max() == 4
    assert rb.stats()["conditional_stale"] == 8


def test_the_switch_may_be_a_class_attribute():
    class Mine(g.GenerationalTensorDictPrioritizedReplayBuffer):
        conditional_updates = True

    made = {"alpha": 1.0, "beta": 1.0, "storage": g.GenerationalLazyTensorStorage(8)}
    assert Mine(**made).conditional_updates
    assert not Mine(**made, conditional_updates=False).conditional_updates


def test_an_update_that_arrives_while_another_thread_gives_a_first_priority_compares_handles(actors):
    started = []

    class Watched(g.GenerationalTensorDictPrioritizedReplayBuffer):
        def update_tensordict_priority(self, data):
            if data is not gone:  # the writer, inside add
                started.append(actors.start("learner", lambda: self.update_tensordict_priority(gone)))
                until_blocked_or_done(blocked, started[0])
            super().update_tensordict_priority(data)

    rb = Watched(
        alpha=1.0, beta=1.0, storage=g.GenerationalLazyTensorStorage(8), batch_size=8, conditional_updates=True
    )
    rb.extend(records(8))
    gone, _ = wrapped(rb)
    blocked = announce_blocked(rb.storage.lock, "learner")
    rb.add(records(1, td_error=torch.tensor([4.0]))[0])
    started[0].result(TIMEOUT)
    assert leaves(rb).max() == 4
    assert rb.stats()["conditional_stale"] == 8


def test_the_switch_reaches_the_learners_sampler_of_an_asynchronous_buffer():
    rb = use_conditional_updates(prioritized(sync=False))
    rb.extend(records(8))
    gone = rb.sample().set("td_error", torch.full([8], 9.0))
    rb.extend(records(8))
    live = rb.sample().set("td_error", torch.full([8], 9.0))
    rb.update_tensordict_priority(gone)
    assert rb.prioritized_sampler.default_priority == 1
    rb.update_tensordict_priority(live)
    assert rb.prioritized_sampler.default_priority == pytest.approx(9.0)


@pytest.mark.parametrize("missing", ["index", "index_generation", "td_error"])
@pytest.mark.parametrize("way", ["switch", "hook"])
def test_a_sample_without_what_the_comparison_takes_is_refused_and_nothing_changes(way, missing):
    rb = filled()
    update = (
        use_conditional_updates(rb).update_tensordict_priority
        if way == "switch"
        else GenerationalReplayBufferTrainer(rb).update_priority
    )
    sample = rb.sample().set("td_error", torch.full([8], 9.0))
    before = sampler_state(rb)
    with pytest.raises(KeyError, match=f"reads the entry '{missing}'"):
        update(sample.exclude(missing))
    assert sampler_state(rb) == before


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_without_priorities_nothing_is_updated_as_in_torchrl(sampler):
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), sampler=sampler(), batch_size=4, conditional_updates=True
    )
    rb.extend(records(8))
    rb.update_tensordict_priority(rb.sample())
    GenerationalReplayBufferTrainer(rb).update_priority(rb.sample())
    assert rb.stats()["conditional_updated"] == rb.stats()["conditional_stale"] == 0


def stock() -> Any:
    return TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(8), batch_size=4)


@pytest.mark.parametrize(
    ("use", "remedy"),
    [
        (use_conditional_updates, "Use GenerationalTensorDictPrioritizedReplayBuffer.*conditional_updates=True"),
        (GenerationalReplayBufferTrainer, "Use GenerationalTensorDictPrioritizedReplayBuffer.*ReplayBufferTrainer"),
    ],
)
@pytest.mark.parametrize(
    "buffer", [stock, lambda: ReplayBuffer(storage=LazyTensorStorage(8)), g.GenerationalReplayBuffer, object]
)
def test_a_buffer_that_cannot_compare_handles_is_refused(use, remedy, buffer):
    rb = buffer()
    with pytest.raises(TypeError, match=f"got {type(rb).__name__}. {remedy}"):
        use(rb)
    assert not hasattr(rb, "conditional_updates")


def test_a_stock_buffer_refuses_the_argument():
    with pytest.raises(TypeError, match="conditional_updates"):
        TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, conditional_updates=True)


# ---------------------------------------------------------------- the hook


COLLECTED = {
    "plain": TensorDict({"x": torch.arange(6.0)}, [6]),
    "masked": TensorDict(
        {
            "x": torch.arange(6.0).reshape(2, 3),
            "collector": {"mask": torch.tensor([[True, True, False], [True, False, False]])},
            "next": {},
        },
        [2, 3],
    ),
    "cut": TensorDict(
        {"x": torch.arange(6.0).reshape(2, 3), "next": {"truncated": torch.zeros(2, 3, dtype=torch.bool)}}, [2, 3]
    ),
}


@pytest.mark.parametrize(
    ("arguments", "collected"),
    [
        ((), "plain"),
        ((4,), "plain"),
        ((None, True, "cpu", True), "masked"),
        ((None, False, None, True), "cut"),
        ((None, False, None, False, [-1, 5]), "cut"),
        ((3, False, "cpu", False, None, False), "plain"),
        ((None, False, None, False, None, True), "plain"),
    ],
)
def test_the_hook_takes_the_arguments_of_torchrls_and_collects_and_samples_like_it(arguments, collected):
    seen = []
    for kind in (ReplayBufferTrainer, GenerationalReplayBufferTrainer):
        rb = prioritized(16, batch_size=None if arguments[:1] in [(3,), (4,)] else 4)
        hook = kind(rb, *arguments)
        data = hook.extend(COLLECTED[collected].clone())
        sample = hook.sample(data)
        stored = rb[:].to_dict()
        seen.append(([data.to_dict(), sample.to_dict(), stored], sample.device, hook.memmap, hook.device))
    theirs, ours = seen
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0)
    assert ours[1:] == theirs[1:]


def test_the_hook_begins_again_when_an_iteration_ends():
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=g.GenerationalLazyTensorStorage(8), sampler=SamplerWithoutReplacement(), batch_size=4
    )
    rb.extend(records(8))
    hook = GenerationalReplayBufferTrainer(rb, iterate=True)
    for _ in range(2):
        assert [len(hook.sample(TensorDict())) for _ in range(2)] == [4, 4]
        with pytest.raises(StopIteration):
            hook.sample(TensorDict())


def test_the_hook_goes_by_handles_whatever_the_switch_says_and_at_either_stage():
    rb = filled()
    hook = GenerationalReplayBufferTrainer(rb)
    gone, live = wrapped(rb)
    before = sampler_state(rb)
    hook.update_priority(gone)
    assert sampler_state(rb) == before
    hook.update_priority(live)
    assert rb.sampler.default_priority == pytest.approx(9.0)


def test_checkpoints_of_the_hook_and_of_torchrls_load_into_each_other():
    rb = filled()
    hook, theirs = GenerationalReplayBufferTrainer(rb), ReplayBufferTrainer(rb)
    hook.register(plain_trainer())
    theirs_restored, restored = ReplayBufferTrainer(filled()), GenerationalReplayBufferTrainer(filled())
    restored.register(plain_trainer())
    rb.update_tensordict_priority(rb.sample().set("td_error", torch.rand(8)))
    restored.load_state_dict(theirs.state_dict())
    theirs_restored.load_state_dict(hook.state_dict())
    for one in (restored, theirs_restored):
        assert sampler_state(one.replay_buffer) == sampler_state(rb)


def stepping(rb: Any) -> Trainer:
    loss = td3()[1]
    parameters = [torch.optim.Adam(loss.parameters()) for _ in range(2)]
    return plain_trainer(replay_buffer=rb, optimization_stepper=TD3OptimizationStepper(*parameters))


def test_a_stepper_that_would_update_by_raw_index_beside_the_hook_is_refused():
    rb = filled()
    trainer = stepping(rb)
    with pytest.raises(RuntimeError, match="TD3OptimizationStepper updates priorities itself.*use_conditional_updates"):
        GenerationalReplayBufferTrainer(rb).register(trainer)
    hook = GenerationalReplayBufferTrainer(use_conditional_updates(rb))
    hook.register(trainer)  # nothing is in the way of it


def test_a_stepper_that_updates_is_not_doubled_by_the_hook():
    rb = use_conditional_updates(filled())
    trainer = stepping(rb)
    GenerationalReplayBufferTrainer(rb).register(trainer)
    trainer._post_optim_log(rb.sample().set("td_error", torch.rand(8)))
    assert rb.stats()["conditional_updated"] == 0


class Client:
    """A buffer in another process, as Ray's clients are: whatever is asked for is a function, but for the switch."""

    def __init__(self, actor: Any, *, conditional: bool) -> None:
        self._actor, self.conditional = actor, conditional

    def stats(self) -> dict[str, int]:
        return {"conditional_updated": 0, "conditional_stale": 0}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class OurClient(Client):
    @property
    def conditional_updates(self) -> bool:
        return self.conditional

    @conditional_updates.setter
    def conditional_updates(self, conditional: bool) -> None:
        self.conditional = conditional


def test_a_client_is_taken_for_conditional_only_if_its_buffer_says_so():
    actor = object()
    for client in (Client(actor, conditional=True), OurClient(actor, conditional=False)):
        trainer = stepping(Client(actor, conditional=False))  # another client of the same actor
        with pytest.raises(RuntimeError, match="TD3OptimizationStepper updates priorities itself"):
            GenerationalReplayBufferTrainer(client).register(trainer)
    with pytest.raises(TypeError, match="needs a buffer whose samples carry handles, got Client"):
        use_conditional_updates(Client(actor, conditional=False))
    client = use_conditional_updates(OurClient(actor, conditional=False))
    GenerationalReplayBufferTrainer(client).register(trainer)
    assert not trainer._post_optim_log_ops


def test_a_trainer_whose_learners_are_elsewhere_is_refused_before_anything_is_registered():
    rb = filled()
    trainer = plain_trainer(replay_buffer=rb)
    trainer.learner_backend = "ray"
    with pytest.raises(RuntimeError, match="this trainer learns in others.*use_conditional_updates"):
        GenerationalReplayBufferTrainer(rb).register(trainer)
    assert not trainer._batch_process_ops
    LogStaleUpdates(trainer, use_conditional_updates(rb)).register(trainer)


def test_the_hook_passes_over_members_without_priorities_and_buffers_made_late():
    uniform = [g.GenerationalTensorDictReplayBuffer(storage=g.GenerationalLazyTensorStorage(8)) for _ in range(2)]
    for member in uniform:
        member.extend(records(8))
    ensemble = g.GenerationalReplayBufferEnsemble(*uniform, batch_size=4)
    GenerationalReplayBufferTrainer(ensemble).update_priority(ensemble.sample())
    late = g.GenerationalTensorDictReplayBuffer(
        storage=partial(g.GenerationalLazyTensorStorage, 8),
        sampler=partial(g.GenerationalPrioritizedSampler, 8, 1.0, 1.0),
        delayed_init=True,
    )
    with pytest.raises(RuntimeError, match="nothing has been written"):
        GenerationalReplayBufferTrainer(late).update_priority(records(4))


# ---------------------------------------------------------------- the log


class Asked(g.GenerationalTensorDictPrioritizedReplayBuffer):
    """Counts how often its totals are read: on CUDA each waits for the device."""

    asked = 0

    def stats(self) -> Any:
        self.asked += 1
        return super().stats()


def plain_trainer(**kwargs: Any) -> Trainer:
    return Trainer(
        collector=None,
        total_frames=1000,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=None,
        progress_bar=False,
        **{"log_interval": 10} | kwargs,
    )


def collect(trainer: Trainer, frames: int) -> None:
    trainer.collected_frames += frames
    trainer._post_steps_log_hook(None)


def test_a_log_covers_what_happened_since_the_last_and_reads_totals_only_then(csv):
    rb = Asked(alpha=1.0, beta=1.0, storage=g.GenerationalLazyTensorStorage(8), batch_size=8)
    rb.extend(records(8))
    gone, live = wrapped(rb)
    rb.update_tensordict_priority_if_present(gone)  # before the log begins
    trainer = plain_trainer(logger=csv)
    LogStaleUpdates(trainer, rb).register(trainer)
    asked = rb.asked
    for sample, frames in ((gone, 3), (live, 3), (gone, 4)):  # as many as the interval, and no more
        rb.update_tensordict_priority_if_present(sample)
        collect(trainer, frames)
    assert rb.asked == asked
    rb.update_tensordict_priority_if_present(gone)
    collect(trainer, 2)
    assert rb.asked == asked + 1
    collect(trainer, 11)  # due, and there is nothing to log
    rb.update_tensordict_priority_if_present(live)
    collect(trainer, 1)
    assert logged(csv, "num_updated") == [(12, 8), (24, 8)]
    assert logged(csv, "num_stale") == [(12, 24), (24, 0)]
    assert logged(csv, "stale_fraction") == [(12, 0.75), (24, 0)]


def test_what_was_not_logged_yet_survives_a_restart():
    rb = filled()
    gone, live = wrapped(rb)
    trainer = plain_trainer()
    hook = GenerationalReplayBufferTrainer(rb)
    hook.register(trainer)
    for sample in (gone, live, live):
        hook.update_priority(sample)
    collect(trainer, 5)
    saved = trainer._modules["replay_buffer"].state_dict()
    again = GenerationalReplayBufferTrainer(filled())
    restarted = plain_trainer()
    again.register(restarted)
    again.load_state_dict(saved)
    again.update_priority(again.sample(TensorDict()).set("td_error", torch.rand(8)))
    collect(restarted, 11)
    assert dict(restarted._log_dict) == {"num_updated": [24], "num_stale": [8], "stale_fraction": [0.25]}


@pytest.mark.parametrize("buffer", [stock, object])
def test_a_log_of_a_buffer_that_does_not_count_is_refused(buffer):
    rb = buffer()
    with pytest.raises(TypeError, match=f"counts conditional updates, got {type(rb).__name__}. Use Generational"):
        LogStaleUpdates(plain_trainer(), rb)


def test_a_log_waits_for_a_buffer_with_delayed_init():
    rb = g.GenerationalTensorDictReplayBuffer(
        storage=partial(g.GenerationalLazyTensorStorage, 8),
        sampler=partial(g.GenerationalPrioritizedSampler, 8, 1.0, 1.0),
        batch_size=8,
        delayed_init=True,
    )
    trainer = plain_trainer()
    LogStaleUpdates(trainer, rb).register(trainer)
    collect(trainer, 11)
    rb.extend(records(8))
    rb.update_tensordict_priority_if_present(rb.sample().set("td_error", torch.rand(8)))
    collect(trainer, 1)
    assert trainer._log_dict["num_updated"] == [8]
