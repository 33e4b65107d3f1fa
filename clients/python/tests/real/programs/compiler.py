"""A program that compiles a model with ONNX Runtime's ModelCompiler, loads the result with its own
options, and prints what it wrote and computed as JSON.
"""

import json
import os
import sys

import numpy as np
import onnxruntime as ort

ep, library, source, output, way = sys.argv[1:6]
options = json.loads(sys.argv[6]) if len(sys.argv) > 6 else {}
ort.register_execution_provider_library(ep, library)


def session_options():
    made = ort.SessionOptions()
    devices = [device for device in ort.get_ep_devices() if device.ep_name == ep]
    made.add_provider_for_devices(devices[:1], options)
    return made


more = {"external_initializers_file_path": "weights.data"} if way == "unknown" else {}
compiler = ort.ModelCompiler(session_options(), source, way in ("bytes", "stream"), **more)
parts = []
if way == "bytes":
    parts = [compiler.compile_to_bytes()]
elif way == "stream":
    compiler.compile_to_stream(lambda data: parts.append(bytes(data)))
else:
    compiler.compile_to_file(output)
if parts:
    open(output, "wb").write(b"".join(parts))
result = {"files": sorted(os.listdir(os.path.dirname(output)))}
if "QNN" not in ep:  # which compiles without a device, and does not run
    session = ort.InferenceSession(output, session_options())
    given = session.get_inputs()[0]
    ones = np.ones([size if isinstance(size, int) else 1 for size in given.shape], np.float32)
    result["output"] = session.run(None, {given.name: ones})[0].ravel().tolist()
print(json.dumps(result))
