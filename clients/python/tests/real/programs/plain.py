"""A program without epcache: it loads a model in the named way, runs it on ones, and prints the
result as JSON.
"""

import json
import subprocess
import sys

import numpy as np
import onnxruntime as ort
from onnxruntime import InferenceSession, SessionOptions
from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession as Deep

model, way = sys.argv[1:3]
EXACT = {"device_type": "CPU", "load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'}


class Own(InferenceSession):
    """A subclass, as in programs that add a method."""

    def __init__(self, path):
        self.name = "own"
        super().__init__(path, providers=["CPUExecutionProvider"])


def odd():
    """Options that the cache does not support."""
    options = SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return options


def writes():
    options = SessionOptions()
    options.optimized_model_filepath = model + ".optimized"
    return options


ways = {
    "names": lambda: ort.InferenceSession(model, providers=["CPUExecutionProvider"]),
    "positional": lambda: Deep(
        model, odd(), ["CUDAExecutionProvider", "CPUExecutionProvider"], [{"device_id": 0}, {}]
    ),
    "pairs": lambda: InferenceSession(
        path_or_bytes=model,
        sess_options=odd(),
        providers=[("CPUExecutionProvider", {})],
        enable_fallback=0,
    ),
    "named": lambda: InferenceSession(
        model, providers=[("OpenVINOExecutionProvider", EXACT), "CPUExecutionProvider"]
    ),
    "bytes": lambda: InferenceSession(open(model, "rb").read()),
    "subclass": lambda: Own(model),
    "writes": lambda: InferenceSession(model, writes()),
}

if way == "child":
    print(
        subprocess.run(
            [sys.executable, __file__, model, "names"], check=True, capture_output=True, text=True
        ).stdout,
        end="",
    )
    sys.exit()
if way == "missing":
    try:
        InferenceSession(model + ".not")
    except Exception as error:
        print(json.dumps(type(error).__name__))
    sys.exit(7)

session = ways[way]()
assert isinstance(session, ort.InferenceSession) and isinstance(session, Deep)
assert isinstance(session.get_session_options(), ort.SessionOptions)
given = session.get_inputs()[0]
ones = np.ones([size if isinstance(size, int) else 1 for size in given.shape], np.float32)
binding = session.io_binding()
binding.bind_cpu_input(given.name, ones)
binding.bind_output(session.get_outputs()[0].name)
session.run_with_iobinding(binding)
[output] = session.run(None, {given.name: ones})
assert np.array_equal(output, binding.copy_outputs_to_cpu()[0])
print(json.dumps({"output": output.ravel().tolist(), "providers": session.get_providers()}))
