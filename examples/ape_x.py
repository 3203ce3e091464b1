"""Ape-X on CartPole-v1: actor processes write transitions with first priorities into one buffer, a learner samples.

As in Horgan et al., "Distributed Prioritized Experience Replay" (2018, https://arxiv.org/abs/1803.00933):

* each actor explores with an epsilon of its own, from 0.4 down to nearly none;
* an actor computes the TD errors of its transitions with its own copy of the network and writes them along as first
  priorities, so that new transitions are not all sampled once before anything is known about them;
* the learner, in the main process, trains a double DQN on prioritized samples, hands the new TD errors back, and
  publishes its weights, which the actors fetch between two writes.

What is smaller here: one machine, a small network without duelling heads, and 1-step TD errors. The buffer is passed
to the actors as an argument of their processes; they and the learner then use it as if each had it alone.

What to see: the learner keeps ``--delay`` batches in flight, as with a GPU or a remote machine, and actors overwrite
slots meanwhile. Of the rows that it returns, the table counts those refused as stale: their record is gone, and their
TD error would have become the priority of the record that took the slot. A larger ``--delay`` or a smaller
``--capacity`` raises their share. The greediest actor's mean return rises from about 10 towards 500, the most there is;
how far in half a minute depends on the machine. The seed fixes weights and environments, but not how the processes
interleave.

Run ``python examples/ape_x.py``; ``--help`` lists the settings.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import time
from collections import deque
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch.nn.functional import smooth_l1_loss
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torchrl.modules import MLP
from tqdm import tqdm

from torchrl_generational import GenerationalLazyTensorStorage, GenerationalTensorDictPrioritizedReplayBuffer

EPSILON, EXPONENT = 0.4, 7  # actor i of n explores with EPSILON ** (1 + i / (n - 1) * EXPONENT)
ALPHA, BETA = 0.6, 0.4  # priority and importance-sampling exponents
GAMMA = 0.99  # discount
LR = 1e-3  # learning rate of Adam
TARGET = 100  # learner steps between two copies of the weights to the target network
PUBLISH = 4  # learner steps between two copies of the weights to the actors
ENVS = 8  # environments that an actor steps together
STEPS = 16  # of these environments, between two writes
EPISODES = 50  # the last ones of an actor, over which the table averages


class Shared(NamedTuple):
    """What learner and actors tell each other, in shared memory: a process that is killed leaves nothing locked."""

    weights: torch.Tensor  # of the network, flat; the learner writes them
    version: torch.Tensor  # of these weights
    stop: torch.Tensor  # whether the actors shall end
    episodes: torch.Tensor  # [actors]: how many each has finished
    returns: torch.Tensor  # [actors, EPISODES]: a ring of the last ones of each

    @classmethod
    def make(cls, actors: int, weights: torch.Tensor) -> Shared:
        """Nothing has happened yet."""
        count, flag = torch.zeros(actors, dtype=torch.int64), torch.tensor(False)
        fields = (weights, torch.tensor(0), flag, count, torch.zeros(actors, EPISODES))
        return cls(*(tensor.share_memory_() for tensor in fields))

    def mean_return(self, actor: int) -> str:
        """The mean return of an actor's last episodes, to print."""
        recent = self.returns[actor, : int(self.episodes[actor])]
        return f"{recent.mean():.1f}" if len(recent) else "-"


class Actor:
    """Steps environments with an epsilon-greedy copy of the learner's network. Lives in a process of its own."""

    def __init__(self, rank: int, args: argparse.Namespace, shared: Shared) -> None:
        self.envs = gym.make_vec("CartPole-v1", num_envs=ENVS, vectorization_mode="sync")
        self.observation, _ = self.envs.reset(seed=args.seed + rank * ENVS)
        self.ended = np.zeros(ENVS, dtype=bool)  # episodes that the last step ended
        self.scores = np.zeros(ENVS)  # returns so far
        self.network = make_network()
        self.version = -1
        self.epsilon = epsilon(rank, args.actors)
        self.rank = rank
        self.shared = shared

    def fetch(self) -> None:
        """Takes over the learner's weights if they are new. A mixture of two versions would do no harm."""
        version = int(self.shared.version)
        if version != self.version:
            vector_to_parameters(self.shared.weights.clone(), self.network.parameters())
            self.version = version

    @torch.no_grad()
    def collect(self) -> TensorDictBase:
        """The next transitions, with their TD errors."""
        batch: TensorDictBase = torch.cat([self.step() for _ in range(STEPS)])
        batch["td_error"] = td_errors(self.network, self.network, batch).abs()
        return batch

    def step(self) -> TensorDictBase:
        """One step of all environments, of which those whose episode had ended only begin a new one."""
        running, observation = ~self.ended, torch.as_tensor(self.observation)
        explore = torch.rand(ENVS) < self.epsilon
        action = torch.where(explore, torch.randint(2, (ENVS,)), self.network(observation).argmax(-1))
        self.observation, reward, terminated, truncated, _ = self.envs.step(action.numpy())
        self.ended = terminated | truncated
        self.scores += reward
        for score in self.scores[self.ended]:
            count = int(self.shared.episodes[self.rank])
            self.shared.returns[self.rank, count % EPISODES] = score
            self.shared.episodes[self.rank] = count + 1
        self.scores[self.ended] = 0
        following = {
            "observation": torch.as_tensor(self.observation),  # the last one of the episode where it ended
            "reward": torch.as_tensor(reward, dtype=torch.float32),
            "terminated": torch.as_tensor(terminated),
        }
        transitions = TensorDict({"observation": observation, "action": action, "next": following}, [ENVS])
        return transitions[torch.as_tensor(running)]


def act(rank: int, args: argparse.Namespace, rb: GenerationalTensorDictPrioritizedReplayBuffer, shared: Shared) -> None:
    """The main function of an actor process: writes until told to stop, or until the learner is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the learner stops its actors
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + 1 + rank)
    actor = Actor(rank, args, shared)
    learner = multiprocessing.parent_process()
    while not shared.stop and learner is not None and learner.is_alive():
        actor.fetch()
        rb.extend(actor.collect())


class Actors:
    """The actor processes, as the learner sees them."""

    def __init__(
        self, args: argparse.Namespace, rb: GenerationalTensorDictPrioritizedReplayBuffer, shared: Shared
    ) -> None:
        context = multiprocessing.get_context(args.start_method)
        self.shared = shared
        self.running: dict[int, BaseProcess] = {}
        for rank in range(args.actors):
            self.running[rank] = context.Process(target=act, args=(rank, args, rb, shared), daemon=True)
            self.running[rank].start()

    def alive(self) -> bool:
        """Whether any actor is; says which have died since the last call."""
        for rank, process in list(self.running.items()):
            if not process.is_alive():
                del self.running[rank]
                died = f"Actor {rank} died (exit code {process.exitcode}); {len(self.running)} left."
                tqdm.write(died, file=sys.stderr)
        return bool(self.running)

    def stop(self) -> None:
        """Ends them, by force if they do not end by themselves."""
        self.shared.stop.fill_(True)
        for process in self.running.values():
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


class Learner:
    """Samples, trains the network, and hands TD errors back ``--delay`` steps late."""

    def __init__(self, args: argparse.Namespace, rb: GenerationalTensorDictPrioritizedReplayBuffer) -> None:
        self.network, self.target = make_network(), make_network()
        self.target.load_state_dict(self.network.state_dict())
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=LR)
        self.shared = Shared.make(args.actors, self.weights())
        self.in_flight: deque[TensorDictBase] = deque()
        self.delay = args.delay
        self.rb = rb
        self.seconds = 0.0
        self.written = self.steps = self.sampled = self.returned = self.stale = 0

    def weights(self) -> torch.Tensor:
        """A copy of the network's weights, flat."""
        return parameters_to_vector(self.network.parameters()).detach().clone()

    def step(self) -> None:
        """Trains on a new batch and hands back the one sampled ``--delay`` steps ago."""
        sample = self.rb.sample()
        errors = td_errors(self.network, self.target, sample)
        loss = sample["priority_weight"] * smooth_l1_loss(errors, torch.zeros_like(errors), reduction="none")
        self.optimizer.zero_grad()
        loss.mean().backward()
        clip_grad_norm_(self.network.parameters(), 10.0)
        self.optimizer.step()
        self.steps += 1
        self.sampled += len(sample)
        if self.steps % TARGET == 0:
            self.target.load_state_dict(self.network.state_dict())
        if self.steps % PUBLISH == 0:
            self.shared.weights.copy_(self.weights())
            self.shared.version.add_(1)
        sample["td_error"] = errors.detach().abs()
        self.in_flight.append(sample)
        if len(self.in_flight) > self.delay:
            result = self.rb.update_tensordict_priority_if_present(self.in_flight.popleft())
            self.returned += result.updated_mask.numel()
            self.stale += result.num_stale

    def train(self, actors: Actors, args: argparse.Namespace) -> None:
        """Learns for ``--duration`` seconds, as long as there are actors. What is in flight then is not handed back."""
        while len(self.rb) < args.warmup and actors.alive():
            time.sleep(0.01)
        start, prefilled = time.perf_counter(), self.rb.write_count
        layout = "{desc} |{bar:30}| {n:.0f}/{total:.0f} s{postfix}"
        with tqdm(total=args.duration, desc="Ape-X", bar_format=layout, disable=args.no_progress) as bar:
            while self.seconds < args.duration and actors.alive():
                self.step()
                self.seconds = time.perf_counter() - start
                if self.seconds - bar.n >= 0.25:
                    returns = self.shared.mean_return(args.actors - 1)
                    share = ratio(self.stale, self.returned)
                    bar.set_postfix_str(f"mean return of the greediest {returns}, stale {share}", refresh=False)
                    bar.update(min(self.seconds, args.duration) - bar.n)
        self.written = self.rb.write_count - prefilled


def make_network() -> MLP:
    """The Q-network: CartPole's 4 observations to the values of its 2 actions."""
    return MLP(in_features=4, out_features=2, num_cells=[128, 128], activation_class=torch.nn.ReLU)


def td_errors(network: MLP, target: MLP, batch: TensorDictBase) -> torch.Tensor:
    """The double-DQN TD errors of transitions. An episode that was only cut short is worth what would have followed."""
    following = batch["next", "observation"]
    with torch.no_grad():
        best = network(following).argmax(-1, keepdim=True)
        worth = target(following).gather(-1, best).squeeze(-1) * ~batch["next", "terminated"]
    value = network(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    errors: torch.Tensor = batch["next", "reward"] + GAMMA * worth - value
    return errors


def epsilon(rank: int, actors: int) -> float:
    """The share of random actions of one actor."""
    return float(EPSILON ** (1 + rank / max(actors - 1, 1) * EXPONENT))


def ratio(part: float, whole: float) -> str:
    """The share to print."""
    return f"{part / whole:.1%}" if whole else "-"


def table(learner: Learner, args: argparse.Namespace) -> str:
    """What the run did."""
    seconds = max(learner.seconds, 1e-9)
    rows = [
        ("seconds of learning", f"{learner.seconds:.1f}"),
        ("actors", f"{args.actors}"),
        ("transitions written", f"{learner.written:,}"),
        ("  per second", f"{learner.written / seconds:,.0f}"),
        ("learner steps", f"{learner.steps:,}"),
        ("rows sampled", f"{learner.sampled:,}"),
        ("  per second", f"{learner.sampled / seconds:,.0f}"),
        ("rows returned", f"{learner.returned:,}"),
        ("rows refused as stale", f"{learner.stale:,}"),
        ("  refused, of the rows returned", ratio(learner.stale, learner.returned)),
    ]
    for rank, episodes in enumerate(learner.shared.episodes.tolist()):
        rows.append((f"actor {rank}, epsilon {epsilon(rank, args.actors):.4f}: episodes", f"{episodes:,}"))
        rows.append((f"  mean return of the last {EPISODES}", learner.shared.mean_return(rank)))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}{value:>14}" for label, value in rows)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the settings."""
    parser = argparse.ArgumentParser(
        description="Ape-X on CartPole-v1: actor processes and a learner on one prioritized buffer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--actors", type=int, default=2, help="actor processes")
    add("--start-method", choices=("spawn", "fork"), default="spawn", help="how they are started")
    add("--seed", type=int, default=0, help="of the weights and the environments")
    add("--duration", type=float, default=30.0, help="seconds of learning")
    add("--capacity", type=int, default=20_000, help="slots of the buffer")
    add("--warmup", type=int, default=1000, help="transitions in the buffer before learning starts")
    add("--batch-size", type=int, default=128, help="rows per learner step")
    add("--delay", type=int, default=8, help="learner steps between sampling a batch and updating its priorities")
    add("--no-progress", action="store_true", help="show no progress bar")
    args = parser.parse_args(argv)
    for name in ("actors", "duration", "capacity", "warmup", "batch_size"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if args.delay < 0:
        parser.error("--delay must not be negative")
    if args.warmup > args.capacity:
        parser.error("--warmup must not be larger than --capacity")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs it; returns 1 if no actor survived."""
    args = parse(argv)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rb = GenerationalTensorDictPrioritizedReplayBuffer(
        alpha=ALPHA,
        beta=BETA,
        storage=GenerationalLazyTensorStorage(args.capacity),
        batch_size=args.batch_size,
        shared=True,
    )
    learner = Learner(args, rb)
    actors = Actors(args, rb, learner.shared)
    try:
        learner.train(actors, args)
    finally:
        actors.stop()
    print(table(learner, args))
    if not actors.running:
        print("\nFAILED: no actor is left.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
