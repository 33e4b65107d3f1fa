"""Weight-sharing groups: requests and answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import epcache
import pytest
from fake_daemon import FakeDaemon, Peer
from test_client import answer, connect

pytestmark = pytest.mark.usefixtures("no_leak")

SHARE = {"ep.share_ep_contexts": "1"}
MEMBERS = [
    {"name": "a", "model_digest": "11", "graph": "abc/x_ctx.onnx", "session_options": SHARE},
    {"name": "b", "model_digest": "22", "graph": "abc/x_2_ctx.onnx", "session_options": SHARE},
]


@pytest.fixture
def group(tmp_path: Path) -> list[str]:
    """Two models in directories of their own, both with external data of the same name."""
    paths = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w.bin").write_bytes(f"weights of {name}".encode())
        paths.append(tmp_path / name / f"{name}.onnx")
        paths[-1].write_bytes(f"model {name}".encode())
    return [str(path) for path in paths]


class Script:
    """A fake daemon that asks for the external data of both models, and records it."""

    def __init__(self, view: Path, need: dict[str, Any] | None, **more: Any) -> None:
        self.view, self.need, self.more = view, need, more
        self.got: list[list[tuple[str, bytes, dict[str, bytes]]]] = []

    def __call__(self, peer: Peer) -> None:
        peer.hello()
        while True:
            request = peer.acquire()
            asked = request["acquire"]

            def read(number: int) -> bytes:
                return os.pread(peer.received[number], 100, 0)

            models = [asked["model"], *asked["group"]]
            self.got.append(
                [
                    (
                        m["name"],
                        read(m["fd"]),
                        {e["location"]: read(e["fd"]) for e in m["external"]},
                    )
                    for m in models
                ]
            )
            while peer.received:
                os.close(peer.received.pop())
            if self.need is not None and not any(external for _, _, external in self.got[-1]):
                peer.send({"request": request["request"], "need": self.need})
            else:
                answer(peer, request, self.view, members=MEMBERS, **self.more)


def test_all_models_are_sent_in_order_each_with_its_own_files(group: list[str], view: Path) -> None:
    script = Script(view, {"locations": ["w.bin", "w.bin"], "members": [0, 1]})
    with FakeDaemon(script) as daemon, connect(daemon) as client:
        artefact = client.acquire(group[0], "E", group=group[1:])
        assert [(m.name, m.graph, m.session_options) for m in artefact.members] == [
            ("a", "abc/x_ctx.onnx", SHARE),
            ("b", "abc/x_2_ctx.onnx", SHARE),
        ]
        assert artefact.member == 0 and "ep.share_ep_contexts" not in artefact.session_options
        artefact.close()
        client.acquire(group[0], "E", group=group[1:]).close()
    bare = [("a.onnx", b"model a", {}), ("b.onnx", b"model b", {})]
    full = [
        ("a.onnx", b"model a", {"w.bin": b"weights of a"}),
        ("b.onnx", b"model b", {"w.bin": b"weights of b"}),
    ]
    assert script.got == [bare, full, full], (
        "the second request brings what the first was asked for"
    )


@pytest.mark.parametrize("members", [[0], [0, 2]])
def test_external_data_of_an_unknown_member_is_a_protocol_error(
    group: list[str], view: Path, members: list[int]
) -> None:
    script = Script(view, {"locations": ["w.bin", "w.bin"], "members": members})
    with (
        FakeDaemon(script) as daemon,
        connect(daemon) as client,
        pytest.raises(epcache.ProtocolError),
    ):
        client.acquire(group[0], "E", group=group[1:])


@pytest.mark.parametrize("more", [{"member": 2}, {"graph": "../x"}])
def test_group_graph_outside_the_view_is_a_protocol_error(
    group: list[str], view: Path, more: dict[str, Any]
) -> None:
    with (
        FakeDaemon(Script(view, None, **more)) as daemon,
        connect(daemon) as client,
        pytest.raises(epcache.ProtocolError),
    ):
        client.acquire(group[0], "E", group=group[1:])


def test_member_graph_outside_the_view_is_a_protocol_error(group: list[str], view: Path) -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        answer(
            peer, peer.acquire(), view, members=[MEMBERS[0], {**MEMBERS[1], "graph": "abc/../../x"}]
        )

    with (
        FakeDaemon(script) as daemon,
        connect(daemon) as client,
        pytest.raises(epcache.ProtocolError),
    ):
        client.acquire(group[0], "E", group=group[1:])


def test_members_share_a_descriptor_and_the_last_one_ends_the_lease(
    group: list[str], view: Path
) -> None:
    pytest.importorskip(
        "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
    )
    from epcache._session_group import member_artefacts

    with FakeDaemon(Script(view, None)) as daemon, connect(daemon) as client:
        first, second = member_artefacts(client.acquire(group[0], "E", group=group[1:]))
    assert first.fd == second.fd
    assert os.path.dirname(first.path) == os.path.dirname(second.path)
    assert (
        second.path.endswith("abc/x_2_ctx.onnx")
        and second.model_digest == "22"
        and second.member == 1
    )
    assert second.session_options == SHARE
    descriptor = second.fd
    assert descriptor is not None
    first.close()
    first.close()
    os.fstat(descriptor)
    second.close()
    with pytest.raises(OSError):
        os.fstat(descriptor)


@pytest.mark.parametrize("wishes", [{"on_miss": "background"}, {"on_miss": "claim"}])
def test_invalid_group_arguments_are_errors(group: list[str], wishes: dict[str, Any]) -> None:
    pytest.importorskip(
        "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
    )
    with pytest.raises(ValueError, match="for a group"):
        epcache.SessionGroup(group, ep="OpenVINOExecutionProvider", **wishes)
    with pytest.raises(ValueError, match="at least two models"):
        epcache.SessionGroup(group[:1], ep="OpenVINOExecutionProvider")
