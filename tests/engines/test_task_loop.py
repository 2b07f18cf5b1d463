"""The site's executor reads no message that no honest server would send."""

from __future__ import annotations

import pytest
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.runtime import RuntimeHttpClient

from partita.engines.flower import task_loop
from partita.engines.flower.task_loop import BoundedClient, TooLarge


@pytest.fixture
def client() -> BoundedClient:
    return BoundedClient.__new__(BoundedClient)  # it connects to nothing


def test_message_of_too_many_parts_is_not_pulled(client: BoundedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(parts: int) -> PullAppMessagesResponse:
        records = [ObjectTree(children=[ObjectTree()] * (parts - 2))]
        return PullAppMessagesResponse(message_object_trees=[ObjectTree(children=records)])

    monkeypatch.setattr(task_loop, "MAX_OBJECTS", 50)
    monkeypatch.setattr(RuntimeHttpClient, "PullMessages", lambda self, request: message(parts))
    parts = 50
    assert client.PullMessages(PullAppMessagesRequest()) == message(50)
    parts = 51
    with pytest.raises(TooLarge, match="a message has more than 50 parts; it is not answered"):
        client.PullMessages(PullAppMessagesRequest())


@pytest.mark.parametrize("kind", ["MetricRecord", "ConfigRecord", "RecordDict", "Array"])
def test_record_of_too_many_bytes_is_not_read(
    client: BoundedClient, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    body = b" 0\0" + b"x" * task_loop.MAX_RECORD_BYTES
    pulled = {each: PullObjectResponse(object_content=each.encode() + body) for each in (kind, "ArrayChunk")}
    monkeypatch.setattr(RuntimeHttpClient, "PullObject", lambda self, request: pulled[request.object_id])
    assert client.PullObject(PullObjectRequest(object_id="ArrayChunk")) == pulled["ArrayChunk"]
    with pytest.raises(TooLarge, match=r"a record of a message has 1,048,\d+ bytes; at most 1,048,576 are read"):
        client.PullObject(PullObjectRequest(object_id=kind))
