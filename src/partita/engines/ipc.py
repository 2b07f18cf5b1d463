"""Named tensors in shared memory, and messages between processes that send tensors as raw memory."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

import torch

from partita.core.tensors import Tensors

ALIGNMENT = 64  # bytes, like torch's allocator: with another alignment, some kernels sum in another order
MAX_VIEWS = 1024  # buffers that Linux reads or writes in one call (IOV_MAX)


def shared_buffer(like: Tensors) -> torch.Tensor:
    """Return shared memory for tensors like these, (byte,). Every process that gets it can read and write it."""
    return torch.empty(_offsets(like)[-1], dtype=torch.uint8).share_memory_()


def _offsets(like: Tensors) -> list[int]:
    """Return the byte offset of each tensor, in order of name, and the end of the last."""
    sizes = (-(-like[name].nbytes // ALIGNMENT) * ALIGNMENT for name in sorted(like))
    return list(accumulate(sizes, initial=0))


def tensor_views(buffer: torch.Tensor, like: Tensors) -> Tensors:
    """Return the tensors in a buffer from `shared_buffer` as views.

    Args:
        buffer: The buffer, uint8.
        like: Tensors with the names, dtypes and shapes of the contents.
    """
    return {
        name: buffer[start : start + like[name].nbytes].view(like[name].dtype).view(like[name].shape)
        for name, start in zip(sorted(like), _offsets(like), strict=False)
    }


def end_with_parent() -> None:
    """Exit this process when its parent ends for any reason, since nothing else reads its results.

    SIGTERM ends it too. A fork would otherwise handle the signal like its parent.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        Thread(target=_exit_after, args=(parent,), daemon=True).start()


@contextmanager
def ctrl_c_is_for_parent() -> Iterator[None]:
    """Processes that are started in this context do not receive SIGINT, which a terminal sends to children too.

    The parent receives it at the end of the context at the latest, and ends them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


class _TensorPickler(pickle.Pickler):
    """Pickles a message with a number in place of each tensor. The same tensor always gets the same number."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, torch.Tensor] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors[id(value)] = value
        return id(value)


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Mapping[int, torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self.tensors[number]


def send(pipe: Connection, message: object) -> None:
    """Send a message through `pipe`.

    Tensors are sent as raw CPU memory, because pickling them takes several times as long.
    """
    file = io.BytesIO()
    skeleton = _TensorPickler(file)
    skeleton.dump(message)
    layouts = [(number, value.dtype, value.shape, value.is_cpu) for number, value in skeleton.tensors.items()]
    pipe.send_bytes(pickle.dumps((layouts, file.getvalue())))
    _transfer(os.writev, pipe, [value.detach().cpu().contiguous() for value in skeleton.tensors.values()])


def receive(pipe: Connection, device: torch.device) -> Any:
    """Receive a message. Tensors that were not on the sender's CPU are moved to `device`."""
    layouts, skeleton = pickle.loads(pipe.recv_bytes())
    values = [torch.empty(shape, dtype=dtype) for _, dtype, shape, _ in layouts]
    _transfer(os.readv, pipe, values)
    placed = zip(layouts, values, strict=True)
    tensors = {number: value if on_cpu else value.to(device) for (number, _, _, on_cpu), value in placed}
    return _TensorUnpickler(io.BytesIO(skeleton), tensors).load()


def _transfer(move: Callable[[int, list[memoryview]], int], pipe: Connection, values: Sequence[torch.Tensor]) -> None:
    """Move bytes between the pipe and the tensors' memory. Each call moves what it can of up to MAX_VIEWS buffers."""
    rest = deque(view for value in values if (view := value.flatten().view(torch.uint8).numpy().data))
    while rest:
        count = move(pipe.fileno(), list(islice(rest, MAX_VIEWS)))
        if not count:
            raise EOFError
        while rest and count >= len(rest[0]):
            count -= len(rest.popleft())
        if count:
            rest[0] = rest[0][count:]
