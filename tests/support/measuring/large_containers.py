"""Large containers of entries, as replay buffers have them, with functions that change and describe them."""

import gc
import pickle
import random
from collections import deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_normtheory.measuring.watched import MANY

Step = namedtuple("Step", "state reward")


@dataclass
class Transition:
    state: Any
    reward: float


def as_tuple(i: int) -> Any:
    return (torch.tensor([i, -0.0]), float(i))


def as_namedtuple(i: int) -> Any:
    return Step(np.array([i, 0.5]), float(i))


def as_dataclass(i: int) -> Any:
    return Transition(torch.tensor([float(i)]), float(i))


def as_dict(i: int) -> Any:
    return {"state": np.array([i, 0.5]), "reward": float(i), "tags": [i]}


ENTRIES = {"tuple": as_tuple, "namedtuple": as_namedtuple, "dataclass": as_dataclass, "dict": as_dict}


CONTAINERS = {
    "list": list,
    "deque": deque,
    "full deque": lambda entries: deque(entries, maxlen=MANY + 10),
    "dict": lambda entries: dict(enumerate(entries)),
}


def keys(buffer: Any) -> Any:
    return list(buffer) if isinstance(buffer, dict) else range(len(buffer))


def state_of(entry: Any) -> Any:
    return entry["state"] if isinstance(entry, dict) else entry.state if hasattr(entry, "state") else entry[0]


def write(entry: Any) -> None:
    """Change everything that can be changed in an entry."""
    state_of(entry)[0] += 1
    if isinstance(entry, Transition):
        entry.reward, entry.extra = 7.0, [1]
    if isinstance(entry, dict):
        entry["reward"] = 7.0
        entry["tags"].append(1)


def write_sampled(buffer: Any) -> None:
    for key in random.sample(list(keys(buffer)), 8):
        write(buffer[key])


def write_all(buffer: Any) -> None:
    for entry in buffer.values() if isinstance(buffer, dict) else buffer:
        write(entry)


def look(buffer: Any) -> tuple:
    """Type, identities and contents, to the last bit."""
    entries = list(buffer.items() if type(buffer) is dict else enumerate(buffer))
    everything = [
        (key, id(value), pickle.dumps(value), sorted(map(id, gc.get_referents(value)))) for key, value in entries
    ]
    return type(buffer), id(buffer), everything


def make(kind: str, entry: str) -> Any:
    return CONTAINERS[kind](ENTRIES[entry](i) for i in range(MANY + 10))


def model_with(buffer: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    model.memory = type("Memory", (), {})()
    model.memory.buffer, model.again = buffer, [{"memory": buffer}]
    return model


def plain(buffer: Any) -> Any:
    """The entries in a container that nobody watches, not read by the container's own methods."""
    kind = next(base for base in (list, deque, dict) if isinstance(buffer, base))
    return dict(zip(dict.keys(buffer), dict.values(buffer))) if kind is dict else list(kind.__iter__(buffer))


def identities(buffer: Any) -> list:
    entries = plain(buffer)
    return [(key, id(value)) for key, value in (entries.items() if isinstance(entries, dict) else enumerate(entries))]
