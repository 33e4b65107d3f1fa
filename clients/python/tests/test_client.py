"""The client against a fake daemon without faults."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from pathlib import Path

import epcache
import pytest
from epcache import _connections, _messages, _wire
from fake_daemon import FakeDaemon, Peer

pytestmark = pytest.mark.usefixtures("no_leak")

REPLY = {
    "outcome": "hit",
    "graph": "abc/x_ctx.onnx",
    "fd": 0,
    "request_key": "k",
    "ep": "OpenVINOExecutionProvider",
}


def answer(peer: Peer, request: dict, view: Path, **more: object) -> None:
    descriptor = os.open(view, os.O_RDONLY | os.O_DIRECTORY)
    try:
        reply = {**REPLY, "view": str(view), **more}
        peer.send({"request": request["request"], "acquire_reply": reply}, [descriptor])
    finally:
        os.close(descriptor)


def connect(daemon: FakeDaemon, **more: object) -> epcache.Client:
    # Long timeouts, because the machine of the tests may be busy.
    return epcache.Client(daemon.path, hello_limit=10, **more)


def hits(view: Path, **more: object):
    def script(peer: Peer) -> None:
        peer.hello()
        while True:
            answer(peer, peer.acquire(), view, **more)

    return script


def test_output_is_sent_only_if_given(model: str, view: Path) -> None:
    asked = []

    def script(peer: Peer) -> None:
        peer.hello()
        for _ in range(2):
            request = peer.acquire()
            asked.append(request["acquire"].get("output"))
            answer(peer, request, view)

    output = epcache.Output("rest.bin", 100, node_name_prefix="left_", complete=True)
    with FakeDaemon(script) as daemon, connect(daemon) as client:
        client.acquire(model, "A").close()
        client.acquire(model, "A", output=output).close()
    assert not asked[0] or not any(asked[0].values())
    assert asked[1] == {
        "external_initializers_file": "rest.bin",
        "external_initializers_threshold": 100,
        "keep_initializers_in_source": False,
        "node_name_prefix": "left_",
        "complete": True,
    }


def test_bytes_options_have_the_files_directory(model: str, view: Path) -> None:
    with (
        FakeDaemon(hits(view)) as daemon,
        connect(daemon) as client,
        client.acquire(model, "A") as held,
    ):
        assert held.bytes_options() == {
            "ep.context_file_path": held.path,
            "session.model_external_initializers_file_folder_path": os.path.dirname(held.path),
        }


@pytest.mark.parametrize("option", ["ep.enable_weightless", "ep.enable_weightless_mode"])
def test_weightless_artefacts_have_the_path_of_their_source(
    model: str, view: Path, option: str
) -> None:
    files = [
        {"name": name, "size": 8, "digest": ""}
        for name in ("abc/x_ctx.onnx", "abc/m.onnx", "abc/model.data")
    ]
    for value, more, told in (("1", files, True), ("0", files, False), ("1", files[:1], False)):
        reply = {"session_options": {option: value}, "files": more}
        with (
            FakeDaemon(hits(view, **reply)) as daemon,
            connect(daemon) as client,
            client.acquire(model, "A") as held,
        ):
            options = held.load_options()
            assert options.pop("ep.context_source_model_path", None) == (
                os.path.dirname(held.path) + "/m.onnx" if told else None
            )
            assert options == held.session_options


def test_files_beside_the_graph_are_mapped(model: str, view: Path) -> None:
    (view / "abc" / "sub").mkdir()
    (view / "abc" / "sub" / "w.bin").write_bytes(b"weights")
    (view / "abc" / "empty.bin").touch()
    (view.parent / "else.bin").write_bytes(b"not part of it")
    files = [
        {"name": name, "size": size, "digest": ""}
        for name, size in {
            "abc/x_ctx.onnx": 8,
            "abc/sub/w.bin": 7,
            "abc/empty.bin": 0,
            "abc/../../else.bin": 14,
        }.items()
    ]
    with (
        FakeDaemon(hits(view, files=files)) as daemon,
        connect(daemon) as client,
        client.acquire(model, "A") as held,
    ):
        with held.mapped_files() as mapped:
            assert {name: bytes(data) for name, data in mapped.items()} == {"sub/w.bin": b"weights"}
        assert all(data.closed for data in mapped.values())


def test_artefact_has_the_daemons_answer(model: str, view: Path) -> None:
    more = {
        "compatibility": "optimal",
        "files": [{"name": "abc/x_ctx.onnx", "size": 8, "digest": "d" * 64}],
        "provider_options": {"OpenVINOExecutionProvider": {"entries": {"num_streams": "2"}}},
        "session_options": {"session.disable_cpu_ep_fallback": "1"},
        "graph_optimization_level": "disable_all",
        "compile_seconds": 1.5,
        "warnings": ["w"],
    }
    with FakeDaemon(hits(view, **more)) as daemon, connect(daemon) as client:
        with client.acquire(model, "OpenVINOExecutionProvider:CPU") as artefact:
            assert artefact.outcome == "hit"
            assert artefact.files == [epcache.File("abc/x_ctx.onnx", 8, "d" * 64)]
            assert artefact.provider_options == {"OpenVINOExecutionProvider": {"num_streams": "2"}}
            assert artefact.session_options == {"session.disable_cpu_ep_fallback": "1"}
            assert (artefact.graph_optimization_level, artefact.compile_seconds) == (
                "disable_all",
                1.5,
            )
            assert artefact.view_path == str(view / "abc" / "x_ctx.onnx")
            assert Path(artefact.path).read_bytes() == b"compiled"
            assert not os.get_inheritable(artefact.fd)


def test_closed_artefact_has_no_path(model: str, view: Path) -> None:
    with FakeDaemon(hits(view)) as daemon, connect(daemon) as client:
        artefact = client.acquire(model, "E")
        artefact.close()
        artefact.close()
        with pytest.raises(ValueError):
            artefact.path  # noqa: B018


def test_request_has_all_arguments(model: str, view: Path) -> None:
    seen = []

    def script(peer: Peer) -> None:
        peer.hello()
        envelope = peer.acquire()
        contents = [os.pread(fd, 100, 0) for fd in peer.received]
        seen.append((envelope, contents))
        answer(peer, envelope, view)

    library = os.open(__file__, os.O_RDONLY)
    runtime = epcache.Runtime(
        ort_version="1.31.1",
        ort_library="/l.so",
        libraries=(epcache.Library("E", "/e.so", library),),
    )
    with FakeDaemon(script) as daemon, connect(daemon) as client:
        client.acquire(
            model,
            [
                ("E", {"a": 1, "b": True}),
                epcache.ExecutionProvider(
                    "F", (epcache.Device("NPU", 0x8086, 3, {"k": "v"}),), files={"f": model}
                ),
            ],
            session_options={"s": "1"},
            dims={"batch": 1},
            dims_by_denotation={"DATA_BATCH": 2},
            graph_optimization_level="basic",
            embed=True,
            route="compile_api",
            runtime=runtime,
            on_miss="refresh",
            store="user",
            strict_ort=True,
            verify_output=0.5,
            timeout=2000,
        ).close()
    os.close(library)
    ((envelope, contents),) = seen
    assert 1_900_000 < envelope["deadline_ms"] <= 2_000_000
    request = envelope["acquire"]
    assert request["model"] == {"fd": 0, "name": "model.onnx", "external": [], "path": str(model)}
    first, second = request["eps"]
    assert first == {"name": "E", "devices": [], "options": {"a": "1", "b": "1"}, "option_fds": {}}
    assert second["devices"] == [
        {"type": "NPU", "vendor_id": 0x8086, "device_id": 3, "metadata": {"k": "v"}}
    ]
    assert second["option_fds"] == {"f": 1}
    assert request["runtime"]["ep_libraries"] == [
        {"ep": "E", "path": "/e.so", "fd": 2, "beside": [], "complete": False}
    ]
    assert contents[0] == contents[1] == Path(model).read_bytes()
    assert contents[2] == Path(__file__).read_bytes()[:100]
    assert (request["session_options"], request["free_dimensions"]) == ({"s": "1"}, {"batch": 1})
    assert request["free_dimensions_by_denotation"] == {"DATA_BATCH": 2}
    assert (request["graph_optimization_level"], request["route"], request["store"]) == (
        "basic",
        "compile_api",
        "user",
    )
    assert request["embed"] and request["strict_ort"]
    assert request["verify_output"] == 0.5
    assert request["on_miss"] == _messages.ENUMS["OnMiss"]["REFRESH"]


@pytest.mark.parametrize(
    ("spelled", "want"),
    [
        pytest.param("E", [epcache.ExecutionProvider("E")], id="name"),
        pytest.param(
            "E:npu",
            [epcache.ExecutionProvider("E", (epcache.Device("NPU"),))],
            id="name and device",
        ),
        pytest.param(
            "E:npu,vendor=0x8086,device=25662,is_virtual=1",
            [
                epcache.ExecutionProvider(
                    "E", (epcache.Device("NPU", 0x8086, 0x643E, {"is_virtual": "1"}),)
                )
            ],
            id="ids and metadata",
        ),
        pytest.param(
            "E:device=7",
            [epcache.ExecutionProvider("E", (epcache.Device("", 0, 7),))],
            id="id alone",
        ),
        pytest.param(
            ("E", {"x": False}),
            [epcache.ExecutionProvider("E", (), {"x": "0"})],
            id="name and options",
        ),
        pytest.param(
            ["E", "F"],
            [epcache.ExecutionProvider("E"), epcache.ExecutionProvider("F")],
            id="several",
        ),
        pytest.param(
            [("E:CPU", {})],
            [epcache.ExecutionProvider("E", (epcache.Device("CPU"),))],
            id="list of one",
        ),
    ],
)
def test_spellings_of_execution_providers(spelled: object, want: object) -> None:
    from epcache._request import providers

    assert providers(spelled) == want


@pytest.mark.parametrize(
    "wrong", [[], [""], ["E:CPU,x"], ["E:CPU,device=x"], [1], [("E", "options")], [("E", {}, 1)]]
)
def test_invalid_execution_providers_are_errors(wrong: object, model: str) -> None:
    with pytest.raises((ValueError, TypeError)), epcache.Client("/nowhere") as client:
        client.acquire(model, wrong)


def test_invalid_on_miss_lists_the_choices(model: str) -> None:
    with pytest.raises(ValueError, match="wait, fail"):
        epcache.Client("/nowhere").acquire(model, "E", on_miss="perhaps")


def test_second_request_uses_the_same_connection(model: str, view: Path) -> None:
    with FakeDaemon(hits(view)) as daemon, connect(daemon) as client:
        for _ in range(3):
            client.acquire(model, "E").close()
        assert daemon.connections == 1


def test_progress_comes_in_order(model: str, view: Path) -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()
        for phase in ("reading", "compiling", "storing"):
            progress = {
                "phase": phase,
                "elapsed_ms": 1500,
                "detail": "d",
                "done_bytes": 1,
                "total_bytes": 2,
            }
            peer.send({"request": request["request"], "progress": progress})
        answer(peer, request, view)

    seen: list[epcache.Progress] = []
    with FakeDaemon(script) as daemon, connect(daemon) as client:
        client.acquire(model, "E", progress=seen.append).close()
    assert [progress.phase for progress in seen] == ["reading", "compiling", "storing"]
    assert seen[0] == epcache.Progress("reading", 1.5, "d", 1, 2)


def test_error_in_a_progress_callback_cancels(model: str, view: Path) -> None:
    gone = threading.Event()

    def script(peer: Peer) -> None:
        peer.hello()
        peer.send({"request": peer.acquire()["request"], "progress": {"phase": "compiling"}})
        peer.wait_for_end()
        gone.set()

    def stop(_: object) -> None:
        raise KeyError("stop")

    with FakeDaemon(script) as daemon, connect(daemon) as client:
        with pytest.raises(KeyError):
            client.acquire(model, "E", progress=stop)
        assert gone.wait(2), "the request is not cancelled"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (1, epcache.NotFound),
        (2, epcache.Stale),
        (3, epcache.CompileFailed),
        (4, epcache.Busy),
        (5, epcache.DeadlineExceeded),
        (6, epcache.BadModel),
        (7, epcache.BadRequest),
        (8, epcache.NotAllowed),
        (9, epcache.NoSpace),
        (10, epcache.VersionMismatch),
        (11, epcache.Unavailable),
        (12, epcache.Internal),
        (13, epcache.Cancelled),
        (99, epcache.Internal),
    ],
)
def test_error_classes(model: str, view: Path, number: int, kind: type[epcache.Error]) -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        error = {"class": number, "text": "t", "hint": "h", "facts": {"field": "f"}}
        peer.send({"request": peer.acquire()["request"], "error": error})
        answer(peer, peer.acquire(), view)

    with FakeDaemon(script) as daemon, connect(daemon) as client:
        with pytest.raises(kind) as caught:
            client.acquire(model, "E")
        assert type(caught.value) is kind
        assert (caught.value.text, caught.value.hint, caught.value.facts) == (
            "t",
            "h",
            {"field": "f"},
        )
        # The next request may succeed.
        for _ in range(1 if kind is not epcache.DeadlineExceeded else 0):
            client.acquire(model, "E").close()


def test_answer_without_a_view(model: str) -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        peer.send(
            {
                "request": peer.acquire()["request"],
                "acquire_reply": {"outcome": "key", "request_key": "k", "record": "{}"},
            }
        )

    with FakeDaemon(script) as daemon, connect(daemon) as client:
        artefact = client.acquire(model, "E", on_miss="key_only")
        assert (artefact.outcome, artefact.fd, artefact.view_path) == ("key", None, "")


def test_bytes_come_as_a_sealed_memory_file(view: Path) -> None:
    seen = []

    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()
        (fd,) = peer.received
        seen.append(os.pread(fd, 10, 0))
        with pytest.raises(OSError) as caught:
            os.pwrite(fd, b"x", 0)
        assert caught.value.errno == errno.EPERM
        answer(peer, request, view)

    with FakeDaemon(script) as daemon, connect(daemon) as client:
        client.acquire(b"in memory", "E").close()
    assert seen == [b"in memory"]


def test_open_file_stays_open(model: str, view: Path) -> None:
    with FakeDaemon(hits(view)) as daemon, connect(daemon) as client, open(model, "rb") as file:
        client.acquire(file, "E").close()
        assert file.read(2) == b"no"


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo"])
def test_path_that_cannot_be_opened_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.onnx"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    with pytest.raises((FileNotFoundError, epcache.BadModel)), epcache.Client("/nowhere") as client:
        client.acquire(path, "E")


class Need:
    """A fake daemon that asks for external data, and records it."""

    def __init__(self, locations: list[str], view: Path) -> None:
        self.locations, self.view = locations, view
        self.got: list[dict[str, bytes]] = []
        self.options: dict[str, str] = {}

    def __call__(self, peer: Peer) -> None:
        peer.hello()
        while True:
            request = peer.acquire()
            external = request["acquire"]["model"]["external"]
            self.options = request["acquire"]["session_options"]
            self.got.append(
                {e["location"]: os.pread(peer.received[e["fd"]], 100, 0) for e in external}
            )
            while peer.received:
                os.close(peer.received.pop())
            if external:
                answer(peer, request, self.view)
            else:
                peer.send({"request": request["request"], "need": {"locations": self.locations}})


@pytest.mark.parametrize("count", [1, 63, 64, 300])
def test_external_data_is_sent_by_location(model: str, view: Path, count: int) -> None:
    directory = Path(model).parent / "weights"
    directory.mkdir()
    locations = [f"weights/{number}.bin" for number in range(count)]
    for location in locations:
        (directory.parent / location).write_bytes(location.encode())
    script = Need(locations, view)
    with FakeDaemon(script) as daemon, connect(daemon) as client:
        client.acquire(model, "E").close()
        client.acquire(model, "E").close()
    want = {location: location.encode() for location in locations}
    assert script.got == [{}, want, want], "the second request brings what the first was asked for"


def test_external_data_under_several_spellings(model: str, view: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for name in ("a.bin", "s/a.bin"):
        (tmp_path / name).write_bytes(name.encode())
    spellings = {
        "a.bin": b"a.bin",
        "./a.bin": b"a.bin",
        "s//a.bin": b"s/a.bin",
        "s/../a.bin": b"a.bin",
    }
    script = Need(list(spellings), view)
    with FakeDaemon(script) as daemon, connect(daemon) as client:
        client.acquire(model, "E").close()
    assert script.got[1] == spellings


# ONNX Runtime 1.24 and 1.31 do the same with these: entries (file, or link to), what is opened.
LINKS = {
    "within the directory": ({"m/model.onnx": "", "m/s/w": "", "m/w.bin": "s/w"}, "m/s/w"),
    "a model hub's": (
        {"blobs/1": "", "blobs/2": "", "m/model.onnx": "../blobs/1", "m/w.bin": "../blobs/2"},
        "blobs/2",
    ),
    "a model hub's, deeper": (
        {"blobs/1": "", "blobs/s/2": "", "m/model.onnx": "../blobs/1", "m/w.bin": "../blobs/s/2"},
        "blobs/s/2",
    ),
    "out of the directory": ({"m/model.onnx": "", "key": "", "m/w.bin": "../key"}, ""),
    "a directory that leads out": (
        {"m/model.onnx": "", "keys/w": "", "m/s": "../keys", "m/w.bin": "s/w"},
        "",
    ),
    "a model hub's, data elsewhere": (
        {"blobs/1": "", "keys/2": "", "m/model.onnx": "../blobs/1", "m/w.bin": "../keys/2"},
        "",
    ),
    "a similar name": ({"m/model.onnx": "", "m2/w": "", "m/w.bin": "../m2/w"}, ""),
}


def make_tree(top: Path, entries: dict[str, str]) -> None:
    for name, target in entries.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        if target:
            (top / name).symlink_to(target)
        else:
            (top / name).write_text(name)


@pytest.mark.parametrize("links", LINKS)
def test_external_data_through_links(view: Path, tmp_path: Path, links: str) -> None:
    entries, opened = LINKS[links]
    make_tree(tmp_path, entries)
    script = Need(["w.bin"], view)
    with FakeDaemon(script) as daemon, connect(daemon) as client:
        if opened:
            client.acquire(tmp_path / "m/model.onnx", "E").close()
            assert script.got[1] == {"w.bin": opened.encode()}
            return
        with pytest.raises(epcache.BadModel, match="escapes model directory"):
            client.acquire(tmp_path / "m/model.onnx", "E")
    assert script.got == [{}]


def test_external_data_of_bytes_through_links(view: Path, tmp_path: Path) -> None:
    make_tree(tmp_path, {"m/w.bin": "../key", "key": ""})
    entries = {"session.model_external_initializers_file_folder_path": str(tmp_path / "m")}
    with FakeDaemon(Need(["w.bin"], view)) as daemon, connect(daemon) as client:
        with pytest.raises(epcache.BadModel, match="escapes model directory"):
            client.acquire(b"m", "E", session_options=entries)


def test_external_data_of_a_directory_that_is_exchanged(view: Path, tmp_path: Path) -> None:
    make_tree(tmp_path, {"m/model.onnx": "", "m/w.bin": "", "keys/w.bin": ""})
    script = Need(["w.bin"], view)

    def exchanging(peer: Peer) -> None:
        (tmp_path / "m").rename(tmp_path / "old")
        (tmp_path / "m").symlink_to("keys")
        script(peer)

    with FakeDaemon(exchanging) as daemon, connect(daemon) as client:
        client.acquire(tmp_path / "m/model.onnx", "E").close()
    assert script.got[1] == {"w.bin": b"m/w.bin"}  # beside the model that was opened


def test_external_data_by_callback(view: Path, model: str) -> None:
    script = Need(["w.bin"], view)
    with FakeDaemon(script) as daemon, connect(daemon) as client:
        client.acquire(b"m", "E", external=lambda location: os.open(model, os.O_RDONLY)).close()
    assert script.got[1] == {"w.bin": Path(model).read_bytes()}


@pytest.mark.parametrize(
    "location", ["../w", "/etc/hostname", "a/../../w", "", ".", "a/..", "a\0b"]
)
def test_external_data_outside_the_directory_is_not_opened(
    model: str, view: Path, location: str
) -> None:
    script = Need([location], view)
    with FakeDaemon(script) as daemon, connect(daemon) as client:
        with pytest.raises(epcache.BadModel, match="outside the model's directory"):
            client.acquire(model, "E")
    assert script.got == [{}]


@pytest.mark.parametrize("kind", ["missing", "fifo", "directory"])
def test_external_data_that_cannot_be_read(
    model: str, view: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "fifo":
        os.mkfifo(tmp_path / "w")
    elif kind == "directory":
        (tmp_path / "w").mkdir()
    script = Need(["w"], view)
    with FakeDaemon(script) as daemon, connect(daemon) as client:
        with pytest.raises(epcache.BadModel, match="w: "):
            client.acquire(model, "E")


def test_threads_do_not_wait_for_each_other(model: str, view: Path) -> None:
    all_here = threading.Barrier(8)

    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()
        all_here.wait(5)
        answer(peer, request, view, request_key=request["acquire"]["route"])

    keys = []

    def acquire(number: int) -> None:
        with client.acquire(model, "E", route=str(number)) as artefact:
            keys.append((artefact.request_key, str(number)))

    with FakeDaemon(script) as daemon, connect(daemon) as client:
        threads = [threading.Thread(target=acquire, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert len(keys) == 8
    assert all(got == want for got, want in keys)


def test_forked_child_has_its_own_connection(model: str, view: Path) -> None:
    with FakeDaemon(hits(view)) as daemon, connect(daemon) as client:
        client.acquire(model, "E").close()
        child = _fork(lambda: client.acquire(model, "E").close())
        assert os.waitpid(child, 0)[1] == 0
        client.acquire(model, "E").close()
        assert daemon.connections == 2


def _fork(action) -> int:
    import warnings

    with warnings.catch_warnings():
        # a warning about threads of the fake daemon, which the child does not use
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return child


@pytest.mark.parametrize(
    ("variables", "want"),
    [
        pytest.param({"EPCACHE_SOCKET": "/s"}, ["/s"], id="named: that one alone"),
        pytest.param(
            {"XDG_RUNTIME_DIR": "/run/user/7", "HOME": "/home/u"},
            [
                "/run/user/7/epcached/epcached.sock",
                "/home/u/.local/state/epcached/epcached.sock",
                "/run/epcached/epcached.sock",
            ],
            id="runtime directory",
        ),
        pytest.param(
            {"XDG_STATE_HOME": "/st"},
            ["/st/epcached/epcached.sock", "/run/epcached/epcached.sock"],
            id="state directory",
        ),
        pytest.param(
            {"HOME": "/home/u"},
            ["/home/u/.local/state/epcached/epcached.sock", "/run/epcached/epcached.sock"],
            id="home",
        ),
        pytest.param(
            {"XDG_RUNTIME_DIR": "relative", "XDG_STATE_HOME": "/st"},
            ["/st/epcached/epcached.sock", "/run/epcached/epcached.sock"],
            id="relative directories do not count",
        ),
    ],
)
def test_default_sockets_by_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], want: list[str]
) -> None:
    for name in ("EPCACHE_SOCKET", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert epcache.default_sockets() == want


def test_users_daemon_comes_before_the_systems(
    monkeypatch: pytest.MonkeyPatch, model: str, view: Path
) -> None:
    with FakeDaemon(hits(view, why="user")) as user, FakeDaemon(hits(view, why="system")) as system:
        monkeypatch.setattr(_connections, "default_sockets", lambda: [user.path, system.path])
        with epcache.Client(hello_limit=10) as client, client.acquire(model, "E") as artefact:
            assert artefact.why == "user"
        monkeypatch.setattr(_connections, "default_sockets", lambda: ["/nowhere", system.path])
        with epcache.Client(hello_limit=10) as client, client.acquire(model, "E") as artefact:
            assert artefact.why == "system"


def test_socket_times_are_reported(model: str, view: Path) -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()
        time.sleep(0.05)
        answer(peer, request, view)

    started = time.perf_counter()
    with (
        FakeDaemon(script) as daemon,
        connect(daemon) as client,
        client.acquire(model, "E") as artefact,
    ):
        assert 0.05 <= artefact.round_trip_seconds <= time.perf_counter() - started
        assert artefact.server == "fake"


def test_no_socket_is_inherited(model: str, view: Path) -> None:
    with FakeDaemon(hits(view)) as daemon, connect(daemon) as client:
        client.acquire(model, "E").close()
        (connection,) = client._connections._idle
        assert isinstance(connection._socket, socket.socket)
        assert not connection._socket.get_inheritable()


def test_directory_of_external_data_is_not_sent(model: str, view: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "w.bin").write_bytes(b"weights")
    entries = {
        "session.model_external_initializers_file_folder_path": str(tmp_path / "elsewhere"),
        "session.x64quantprecision": "1",
    }
    for source in (model, Path(model).read_bytes()):
        script = Need(["w.bin"], view)
        with FakeDaemon(script) as daemon, connect(daemon) as client:
            client.acquire(source, "E", session_options=entries).close()
        assert script.got[1] == {"w.bin": b"weights"}
        assert script.options == {"session.x64quantprecision": "1"}


def test_directory_of_external_data_is_ignored_before_onnxruntime_1_28(
    model: str, view: Path, tmp_path: Path
) -> None:
    (tmp_path / "w.bin").write_bytes(b"beside")
    entries = {"session.model_external_initializers_file_folder_path": "/nowhere"}
    script = Need(["w.bin"], view)
    with FakeDaemon(script) as daemon, connect(daemon) as client:
        client.acquire(
            model, "E", session_options=entries, runtime=epcache.Runtime(ort_version="1.27.0")
        ).close()
        with pytest.raises(epcache.BadModel, match="/nowhere"):
            client.acquire(
                model, "E", session_options=entries, runtime=epcache.Runtime(ort_version="1.28.0")
            )
    assert script.got[1] == {"w.bin": b"beside"}
