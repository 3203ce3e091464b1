"""A DQN learner that hands its TD errors back late, on CartPole-v1, with and without conditional updates.

An actor thread steps the environments and writes every transition into a small ring, without pause. The learner
keeps ``--delay`` sampled batches in flight, as with a GPU or a remote machine, and hands back the TD errors of a
batch that many steps after it was sampled. By then the actor has reused a large part of the ring:

* ``raw`` calls TorchRL's ``update_tensordict_priority``. The TD error of a record that is gone lands on the record
  that took its slot: it is misapplied.
* ``conditional`` calls ``update_tensordict_priority_if_present``. Such a row is refused as stale.

The two runs differ in that one call. They have the same seed and settings and run one after the other, so that they
do not slow each other down.

What to see: in the table, "rows put on another record" is large for raw and 0 for conditional, which refused rows of
that kind instead; the plot shows both shares over time. Every transition carries a record id, and ids are compared
and priorities updated in one hold of the storage's lock, so the counts are exact. They also check the package: the
script fails if the conditional run wrote to another record or refused a row whose record was still there.

The seed fixes weights and environments, but not how the threads interleave. How many transitions are written per
learner step depends on the machine and its load, and the shares with it, steeply: they differ between runs and need
not be equal in the two modes. The returns of one run of each do not show that either learns better.

Run ``python examples/delayed_learner.py``; ``--help`` lists the settings.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torchrl import torchrl_logger
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, ExplorationType, GymEnv, RewardSum, SerialEnv, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate
from tqdm import tqdm

from torchrl_generational import GenerationalLazyTensorStorage, GenerationalTensorDictPrioritizedReplayBuffer

MODES = ("raw", "conditional")
STORED = ("observation", "action", *(("next", key) for key in ("observation", "reward", "done", "terminated")))
EPISODES = 50  # over how many the table averages
BINS = 40  # of the plot's time axis
PUBLISH = 4  # learner steps between two copies of the weights to the actor


class Returned(NamedTuple):
    """One batch whose TD errors were handed back: when, and what became of its rows."""

    seconds: float
    rows: int
    refused: int  # as stale
    misapplied: int  # updated, though the slot held another record
    refused_live: int  # refused, though the slot still held the record


@dataclass
class Log:
    """What one run did. Each field is written by one thread."""

    mode: str
    start: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    written: int = 0
    prefilled: int = 0  # of those, before the start
    steps: int = 0
    sampled: int = 0
    returned: list[Returned] = field(default_factory=list)
    episodes: list[tuple[float, float]] = field(default_factory=list)  # (seconds, return) of each

    def now(self) -> float:
        """Seconds since the run started."""
        return time.perf_counter() - self.start

    def total(self, count: str) -> int:
        """One of the counts of :class:`Returned`, over all batches."""
        return sum(getattr(batch, count) for batch in self.returned)

    def returns(self) -> list[float]:
        """Returns of all episodes, in the order in which they ended."""
        return [value for _, value in self.episodes]


class Actor:
    """Collects transitions with an epsilon-greedy copy of the learner's network and writes them into the ring."""

    def __init__(self, args: argparse.Namespace, rb: GenerationalTensorDictPrioritizedReplayBuffer, log: Log) -> None:
        env = TransformedEnv(SerialEnv(args.envs, lambda: GymEnv("CartPole-v1")), RewardSum())
        env.set_seed(args.seed)
        # not the learner's own network: the loss swaps its parameters in and out
        self.network = make_network(env)
        self.explore = EGreedyModule(
            env.action_spec,
            eps_init=1.0,
            eps_end=args.epsilon,
            annealing_num_steps=max(args.explore // args.frames_per_batch, 1),
        )
        self.collector = Collector(
            env,
            TensorDictSequential(self.network, self.explore),
            frames_per_batch=args.frames_per_batch,
            total_frames=-1,
            auto_register_policy_transforms=False,  # a feed-forward policy needs none
        )
        self.batches = iter(self.collector)
        self.stop = threading.Event()
        self.weights: dict[str, torch.Tensor] | None = None  # the learner replaces it as a whole
        self.rb = rb
        self.log = log

    def write_batch(self) -> None:
        """Collects a batch and writes its transitions, each with a record id that no other one has."""
        if self.weights is not None:
            self.network.load_state_dict(self.weights)
        batch = next(self.batches).reshape(-1)
        self.explore.step()
        finished = batch["next", "episode_reward"][batch["next", "done"]]
        self.log.episodes += [(self.log.now(), value) for value in finished.tolist()]
        records = batch.select(*STORED)
        records["record_id"] = torch.arange(self.log.written, self.log.written + len(records))
        self.rb.extend(records)
        self.log.written += len(records)

    def run(self) -> None:
        """Writes without pause until told to stop."""
        while not self.stop.is_set():
            self.write_batch()


class Learner:
    """Samples, trains the DQN, and hands TD errors back ``--delay`` steps late."""

    def __init__(
        self,
        args: argparse.Namespace,
        rb: GenerationalTensorDictPrioritizedReplayBuffer,
        network: QValueActor,
        log: Log,
    ) -> None:
        self.network = network
        self.loss = DQNLoss(network, loss_function="smooth_l1")
        self.loss.make_value_estimator(gamma=args.gamma)
        # The exploration type is one for all threads, and the forward of a loss sets it. Its default would keep the
        # actor from exploring meanwhile; the loss itself draws nothing.
        self.loss.deterministic_sampling_mode = ExplorationType.RANDOM
        self.target = SoftUpdate(self.loss, tau=args.tau)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=args.lr)
        self.in_flight: deque[TensorDictBase] = deque()
        self.delay = args.delay
        self.rb = rb
        self.log = log

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the network's weights."""
        return {name: value.clone() for name, value in self.network.state_dict().items()}

    def step(self) -> None:
        """Trains on a new batch and hands back the one sampled ``--delay`` steps ago."""
        sample = self.rb.sample()
        loss = self.loss(sample)["loss"]  # also writes the td_error of each row into the sample
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.loss.parameters(), 10.0)
        self.optimizer.step()
        self.target.step()
        self.log.steps += 1
        self.log.sampled += len(sample)
        self.in_flight.append(sample)
        if len(self.in_flight) > self.delay:
            self.hand_back(self.in_flight.popleft())

    def hand_back(self, sample: TensorDictBase) -> None:
        """Updates the priorities of a sample and counts, by record id, where they went."""
        with self.rb.storage.lock:  # reentrant: nothing is written between this comparison and the update
            moved = self.rb.storage.get(sample["index"])["record_id"] != sample["record_id"]
            if self.log.mode == "raw":
                self.rb.update_tensordict_priority(sample)
                updated = torch.ones_like(moved)
            else:
                updated = self.rb.update_tensordict_priority_if_present(sample).updated_mask
        counts = (~updated, updated & moved, ~updated & ~moved)
        self.log.returned.append(Returned(self.log.now(), len(sample), *(int(mask.sum()) for mask in counts)))


def make_network(env: EnvBase) -> QValueActor:
    """The Q-network: CartPole's 4 observations to the values of its 2 actions."""
    mlp = MLP(in_features=4, out_features=2, num_cells=[128, 128], activation_class=torch.nn.ReLU)
    return QValueActor(mlp, spec=env.action_spec_unbatched)


def run(mode: str, args: argparse.Namespace) -> Log:
    """Fills the ring, then trains in one mode for ``--duration`` seconds."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # in every run, because closing a SerialEnv raises it again
    log = Log(mode)
    rb = GenerationalTensorDictPrioritizedReplayBuffer(
        alpha=args.alpha,
        beta=args.beta,
        storage=GenerationalLazyTensorStorage(args.capacity),
        batch_size=args.batch_size,
    )
    actor = Actor(args, rb, log)
    learner = Learner(args, rb, make_network(actor.collector.env), log)
    try:
        while len(rb) < args.capacity:
            actor.write_batch()
        log.prefilled = log.written
        log.episodes.clear()
        log.start = time.perf_counter()
        with ThreadPoolExecutor(1, "actor") as pool:
            writing = pool.submit(actor.run)
            try:
                train(learner, actor, writing, args)
            finally:
                actor.stop.set()
        log.seconds = log.now()
        writing.result()  # raises what the actor raised
    finally:
        actor.collector.shutdown()
    return log


def train(learner: Learner, actor: Actor, writing: Future[None], args: argparse.Namespace) -> None:
    """Runs learner steps until the time is up or the actor has failed. What is in flight then is not handed back.

    Goes on beyond the time until one batch has been handed back, so that there is always something to count.
    """
    log = learner.log
    layout = "{desc} |{bar:30}| {n:.0f}/{total:.0f} s{postfix}"
    with tqdm(total=args.duration, desc=f"{log.mode:<11}", bar_format=layout, disable=args.no_progress) as bar:
        while ((now := log.now()) < args.duration or not log.returned) and not writing.done():
            learner.step()
            if log.steps % PUBLISH == 0:
                actor.weights = learner.weights()
            if now - bar.n >= 0.25:
                bar.set_postfix_str(progress(log), refresh=False)
                bar.update(min(now, args.duration) - bar.n)
        bar.update(min(log.now(), args.duration) - bar.n)


def progress(log: Log) -> str:
    """How the run is doing, for the progress bar."""
    recent = log.returned[-100:]
    share = ratio(sum(batch.refused + batch.misapplied for batch in recent), sum(batch.rows for batch in recent))
    return f"mean return {mean(log.returns()[-EPISODES:])}, {'misapplied' if log.mode == 'raw' else 'stale'} {share}"


def mean(values: list[float]) -> str:
    """The mean to print."""
    return f"{sum(values) / len(values):.1f}" if values else "-"


def ratio(part: float, whole: float) -> str:
    """The share to print."""
    return f"{part / whole:.1%}" if whole else "-"


def column(log: Log, args: argparse.Namespace) -> dict[str, str]:
    """One run's column of the table."""
    rows, refused, misapplied = (log.total(count) for count in ("rows", "refused", "misapplied"))
    returns = log.returns()
    rewritten = args.delay * (log.written - log.prefilled) / max(log.steps, 1)
    return {
        "": log.mode,
        "seconds": f"{log.seconds:.1f}",
        "transitions written": f"{log.written:,}",
        "times the ring wrapped": f"{log.written // args.capacity:,}",
        "learner steps": f"{log.steps:,}",
        "part of the ring rewritten per delay": ratio(rewritten, args.capacity),
        "rows sampled": f"{log.sampled:,}",
        "rows returned": f"{rows:,}",
        "rows refused as stale": f"{refused:,}",
        "  refused, of the rows returned": ratio(refused, rows),
        "rows put on another record": f"{misapplied:,}",
        "  misapplied, of the rows returned": ratio(misapplied, rows),
        "rows refused with their record present": f"{log.total('refused_live'):,}",
        "episodes": f"{len(returns):,}",
        f"mean return of the first {EPISODES}": mean(returns[:EPISODES]),
        f"mean return of the last {EPISODES}": mean(returns[-EPISODES:]),
        "best return": f"{max(returns):.0f}" if returns else "-",
    }


def table(logs: list[Log], args: argparse.Namespace) -> str:
    """What the runs did, a column for each."""
    columns = [column(log, args) for log in logs]
    width = max(map(len, columns[0]))
    return "\n".join(f"{label:<{width}}" + "".join(f"{cells[label]:>14}" for cells in columns) for label in columns[0])


def binned(times: list[float], parts: list[float], wholes: list[float], end: float) -> tuple[list[float], list[float]]:
    """Centres of time bins, and sum of ``parts`` over sum of ``wholes`` in each; bins without data are left out."""
    sums = torch.zeros(2, BINS, dtype=torch.float64)
    which = (torch.tensor(times, dtype=torch.float64) / end * BINS).long().clamp(0, BINS - 1)
    sums.index_add_(1, which, torch.tensor([parts, wholes], dtype=torch.float64))
    filled = sums[1] > 0
    centres = (torch.arange(BINS) + 0.5) * end / BINS
    return centres[filled].tolist(), (sums[0] / sums[1])[filled].tolist()


def plot(logs: list[Log], args: argparse.Namespace) -> None:
    """Saves the shares of misapplied and stale rows, and the returns, over time."""
    figure, (shares, returns) = plt.subplots(2, 1, sharex=True, figsize=(9, 7), layout="constrained")
    for log in logs:
        colour = "tab:red" if log.mode == "raw" else "tab:blue"
        times, rows, refused, misapplied = ([batch[i] for batch in log.returned] for i in range(4))
        if log.mode == "conditional":
            shares.plot(*binned(times, refused, rows, log.seconds), color=colour, label="conditional: refused as stale")
        style = {"color": colour} if log.mode == "raw" else {"color": "tab:green", "linestyle": "--"}
        shares.plot(*binned(times, misapplied, rows, log.seconds), **style, label=f"{log.mode}: put on another record")
        ended, values = [seconds for seconds, _ in log.episodes], log.returns()
        returns.plot(*binned(ended, values, [1.0] * len(values), log.seconds), color=colour, label=log.mode)
    shares.set(ylabel="share of the rows returned", ylim=(-0.03, 1.03))
    returns.set(ylabel="mean return of the episodes that ended", xlabel="seconds of training", ylim=(0, None))
    for axes in (shares, returns):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    figure.suptitle(
        f"CartPole-v1, learner {args.delay} steps late: capacity {args.capacity}, batch size {args.batch_size}, "
        f"{args.envs} environments, seed {args.seed}"
    )
    figure.savefig(args.plot, dpi=120)
    plt.close(figure)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the settings."""
    parser = argparse.ArgumentParser(
        description="A late DQN learner on CartPole-v1: raw and conditional priority updates side by side.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--mode", choices=("both", *MODES), default="both", help="which updates to run")
    add("--seed", type=int, default=0, help="of the weights and the environments")
    add("--duration", type=float, default=30.0, help="seconds of training for each mode")
    add("--capacity", type=int, default=2000, help="slots of the ring, filled before the time starts")
    add("--batch-size", type=int, default=128, help="rows per learner step")
    add("--delay", type=int, default=140, help="learner steps between sampling a batch and updating its priorities")
    add("--envs", type=int, default=4, help="environments that the actor steps together")
    add("--frames-per-batch", type=int, default=32, help="transitions per write; a multiple of --envs")
    add("--lr", type=float, default=1e-3, help="learning rate of Adam")
    add("--gamma", type=float, default=0.99, help="discount")
    add("--tau", type=float, default=0.01, help="part of the way that the target network moves per learner step")
    add("--epsilon", type=float, default=0.1, help="share of random actions after --explore transitions")
    add("--explore", type=int, default=5000, help="transitions over which that share falls from 1 to --epsilon")
    add("--alpha", type=float, default=0.3, help="priority exponent, of the squared TD error")
    add("--beta", type=float, default=0.5, help="importance-sampling exponent")
    add("--plot", type=Path, default=Path("delayed_learner.png"), help="where to save the plot")
    add("--no-progress", action="store_true", help="show no progress bar")
    args = parser.parse_args(argv)
    for name in ("capacity", "batch_size", "envs", "frames_per_batch", "duration"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if args.delay < 0:
        parser.error("--delay must not be negative")
    if args.frames_per_batch % args.envs:
        parser.error("--frames-per-batch must be a multiple of --envs")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the modes asked for; returns 1 if the conditional run broke its promise."""
    args = parse(argv)
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    torchrl_logger.setLevel("WARNING")  # its INFO lines would tear the progress bar
    logs = [run(mode, args) for mode in (MODES if args.mode == "both" else (args.mode,))]
    print(table(logs, args))
    plot(logs, args)
    print(f"\nPlot saved to {args.plot.resolve()}")
    conditional = [log for log in logs if log.mode == "conditional"]
    wrong, refused = (sum(log.total(count) for log in conditional) for count in ("misapplied", "refused_live"))
    if wrong or refused:
        print(
            f"\nFAILED: the conditional run put {wrong} rows on another record and refused {refused} rows whose "
            "record was still in its slot. Both must be 0.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
