"""Named tensors in memory that processes share, and messages whose tensors go as they lie in memory."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from partita.core.tensors import Tensors

ALIGNMENT = 64  # bytes, as torch lays tensors out: elsewhere some kernels would sum in another order
MAX_VIEWS = 1024  # pieces of memory that Linux reads or writes in one call


def shared_buffer(like: Tensors) -> Tensor:
    """Memory for tensors like these, which all processes that it is handed to can read and write."""
    return torch.empty(_starts(like)[-1], dtype=torch.uint8).share_memory_()


def _starts(like: Tensors) -> list[int]:
    """Where each begins on a board, by name, and where the last ends."""
    sizes = (-(-like[name].nbytes // ALIGNMENT) * ALIGNMENT for name in sorted(like))
    return list(accumulate(sizes, initial=0))


def tensor_views(flat: Tensor, like: Tensors) -> Tensors:
    """The tensors on a board."""
    return {
        name: flat[start : start + like[name].nbytes].view(like[name].dtype).view(like[name].shape)
        for name, start in zip(sorted(like), _starts(like), strict=False)
    }


def end_with_parent() -> None:
    """End this process when its parent ends, however that happens: nobody else would ever read what it computes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_outlive, args=(parent,), daemon=True).start()


def _outlive(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


class _TensorPickler(pickle.Pickler):
    """A message without its tensors: in their place are numbers, the same for the same one."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, Tensor] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors[id(value)] = value
        return id(value)


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Mapping[int, Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self.tensors[number]


def send(pipe: Connection, message: object) -> None:
    """Tensors go as they lie in memory, by way of the CPU: pickled, they take several times as long."""
    file = io.BytesIO()
    outline = _TensorPickler(file)
    outline.dump(message)
    kinds = [(number, value.dtype, value.shape, value.is_cpu) for number, value in outline.tensors.items()]
    pipe.send_bytes(pickle.dumps((kinds, file.getvalue())))
    _carry(os.writev, pipe, [value.detach().cpu().contiguous() for value in outline.tensors.values()])


def receive(pipe: Connection, device: torch.device) -> Any:
    """The message; what did not lie on the sender's CPU is put on the device."""
    kinds, outline = pickle.loads(pipe.recv_bytes())
    values = [torch.empty(shape, dtype=kind) for _, kind, shape, _ in kinds]
    _carry(os.readv, pipe, values)
    placed = zip(kinds, values, strict=True)
    tensors = {number: value if stays else value.to(device) for (number, _, _, stays), value in placed}
    return _TensorUnpickler(io.BytesIO(outline), tensors).load()


def _carry(move: Callable[[int, list[memoryview]], int], pipe: Connection, values: Sequence[Tensor]) -> None:
    """Between the pipe and the tensors' own memory; a call moves what it can, of so many at most."""
    rest = deque(view for value in values if (view := value.flatten().view(torch.uint8).numpy().data))
    while rest:
        count = move(pipe.fileno(), list(islice(rest, MAX_VIEWS)))
        if not count:
            raise EOFError
        while rest and count >= len(rest[0]):
            count -= len(rest.popleft())
        if count:
            rest[0] = rest[0][count:]
