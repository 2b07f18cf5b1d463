"""A site's own executor: it takes tasks from a SuperNode and answers them with code that is installed at the site.

Flower's executor starts a program by the type of a task, and that program installs and imports the app that came with
the run. Here an app is data: it is never written to disk, unpacked or imported.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NoReturn

import httpx
from flwr.app import Context, Message
from flwr.common.constant import SubStatus
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

POLL = 0.5  # seconds between two questions for a task; the SuperNode itself asks its server every three
ANSWERED = TaskType.CLIENT_APP  # the only type of task that is answered; the server chooses the type
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
MAX_OBJECTS = 20_000  # of a message: its records, and the pieces of its tensors, which Flower cuts into megabytes
PIECES = b"ArrayChunk"  # how such a piece begins
MAX_RECORD_BYTES = 2**20  # of a record of numbers or texts; each entry takes far longer to read than its bytes


class TooLarge(ValueError):
    """A message that no honest server sends. It is refused before it is decoded."""


class BoundedClient(RuntimeHttpClient):
    """Pulls messages with a bounded number of objects, and records of a bounded size."""

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:  # noqa: N802
        found = super().PullMessages(request)
        for tree in found.message_object_trees:
            objects = sum(1 for _ in islice(iterate_object_tree(tree), MAX_OBJECTS + 1))
            if objects > MAX_OBJECTS:
                raise TooLarge(f"a message has more than {MAX_OBJECTS:,} parts; it is not answered")
        return found

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        found = super().PullObject(request)
        content = found.object_content
        if len(content) > MAX_RECORD_BYTES and not content.startswith(PIECES):
            raise TooLarge(f"a record of a message has {len(content):,} bytes; at most {MAX_RECORD_BYTES:,} are read")
        return found


@dataclass(frozen=True)
class Task:
    """A message for the site, and what Flower says about the run that it belongs to.

    Attributes:
        kind: Flower's type of the task.
        message: The message.
        context: Flower's context of the run.
        app: SHA-256 of the app that came with the run. It is not used.
    """

    kind: str
    message: Message
    context: Context
    app: str


Answer = Callable[[Task], Message]


def serve_tasks(address: str, secret: bytes, work: Callable[[str, str], None], running: Callable[[], bool]) -> None:
    """Answer the tasks of a SuperNode, one at a time, each in a fork of this process.

    Tasks of all types are taken, so that a server cannot block the site with a type that nobody takes; what is not for
    a client app is up to `work` to refuse.

    Args:
        address: Host and port of the SuperNode's Runtime API on this machine.
        secret: The secret that the SuperNode was started with; only its holder is given tasks.
        work: Answers the task with a token and a type. It is called in the fork.
        running: Whether the SuperNode still runs; this function returns when it does not.
    """
    own = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[_ACQUIRE])
    client = _client(address, own)
    types = [str(each) for each in TaskType]
    while running():
        try:
            found = client.AcquireTask(AcquireTaskRequest(supported_task_types=types))
        except httpx.HTTPError:  # the SuperNode is not up yet, or it has just ended
            time.sleep(POLL)
            continue
        if found.HasField("task") and found.token:
            # Without a reply, the SuperNode tells the server that the app has crashed.
            run_in_fork(partial(work, found.token, found.task.type))
        time.sleep(POLL)


def _client(address: str, *own: ProtobufClientInterceptor, retry: bool = False) -> RuntimeHttpClient:
    return BoundedClient.from_server_address(
        server_address=address,
        insecure=True,  # the SuperNode listens on the loopback interface only
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), *own],
        retry_invoker=make_simple_http_retry_invoker() if retry else None,
    )


def run_in_fork(work: Callable[[], None]) -> int:
    """Do work in a fork of this process, whose memory, GPU memory included, is freed with it.

    Returns:
        0, or 1 if the work raised an error, which is printed, or exited with another status.
    """
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _run_and_exit(parent, work)
    try:
        _, status = os.waitpid(child, 0)
    except BaseException:  # this process is asked to stop
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    return int(status != 0)


def _run_and_exit(parent: int, work: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
        work()
        status = 0
    except SystemExit as end:
        status = int(end.code != 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _exit_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def answer_task(address: str, token: str, kind: str, answer: Answer) -> None:
    """Pull a task's message, answer it, and push the reply.

    Args:
        address: Host and port of the SuperNode's Runtime API.
        token: The task's token.
        kind: The task's type.
        answer: Returns the reply.
    """
    client = _client(address, RuntimeTokenHttpInterceptor(token), retry=True)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    try:
        message, context, _, app = pull_task_input(client)
        digest = hashlib.sha256(app.content).hexdigest()
        push_message(client, answer(Task(kind, message, context, digest)), context)
        push_task_output(client, context, SubStatus.COMPLETED, "")
    finally:
        heartbeat.stop()
        client.close()
