"""Execution providers from PyPI that make no compiled models, that lack their driver, or that are a
part of ONNX Runtime: the reason that is given, and the outputs of a plain session. `make providers`
fetches them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon

pytestmark = pytest.mark.skipif(
    not os.environ.get("EPCACHED_PROVIDERS"), reason="`make providers` fetches the packages"
)
CLIENT = Path(__file__).resolve().parents[2]
NO_MODELS = ("makes no compiled models", "returned a NULL EPContext node", "took no node")

SESSION = """
import sys, importlib, json, numpy, onnxruntime as ort, epcache
package, library, model = sys.argv[1:]
module = importlib.import_module(package)
ort.register_execution_provider_library("any", getattr(module, library)())
cpu = "CPUExecutionProvider"
devices = [d for d in ort.get_ep_devices() if d.ep_name != cpu][:1]
outputs = []
for make, options in ((ort.InferenceSession, ort.SessionOptions()),
                      (epcache.InferenceSession, epcache.SessionOptions())):
    options.add_provider_for_devices(devices, {})
    session = make(model, options)
    inputs = {i.name: numpy.full([d if isinstance(d, int) else 1 for d in i.shape], 0.5, "float32")
              for i in session.get_inputs()}
    outputs.append([o.tobytes().hex() for o in session.run(None, inputs)])
print(json.dumps({"equal": outputs[0] == outputs[1], "why": session.epcache.why}))
"""


def advice(programs: Path, daemon: Daemon) -> str:
    command = [programs / "epcachectl", "doctor", "--json"]
    environment = {**os.environ, "EPCACHE_SOCKET": daemon.socket}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return json.dumps(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nxrt-0.1.0.dev6", ("cpu_ep", *NO_MODELS)),
        ("ggml-0.2.0", NO_MODELS),
        ("webgpu-0.4.0", ("no device on this machine", *NO_MODELS)),
        ("tensorrt_rtx-0.5.0", ("NVIDIA's driver is missing",)),
        ("gpu-1.31.1", ("cuda, tensorrt: built into this ONNX Runtime",)),
        ("openvino_inside-1.24.1", ("openvino: built into this ONNX Runtime",)),
    ],
)
def test_doctor_says_why_a_provider_is_not_served(
    name: str,
    words: tuple[str, ...],
    start: Callable[..., Daemon],
    runtime: Callable[[str], Path],
    programs: Path,
) -> None:
    text = advice(programs, start(runtime(name)))
    assert any(one in text for one in words), text


@pytest.mark.parametrize(
    ("name", "package", "library"),
    [
        ("nxrt-0.1.0.dev6", "nxrt_ep_cpu", "get_library_path"),
        ("ggml-0.2.0", "onnxruntime_ggml", "library_path"),
    ],
)
def test_sessions_without_compiled_models_compute_the_same(
    name: str,
    package: str,
    library: str,
    start: Callable[..., Daemon],
    runtime: Callable[[str], Path],
    models: Any,
) -> None:
    daemon = start(runtime(name))
    done = subprocess.run(
        [sys.executable, "-c", SESSION, package, library, str(models.path("tiny-mlp"))],
        env={
            **os.environ,
            "EPCACHE_SOCKET": daemon.socket,
            "PYTHONPATH": f"{runtime(name)}:{CLIENT}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["equal"], result
    assert result["why"], "a session that is not from the cache has a reason"
