"""A program that makes its session with ONNX Runtime's C module, and not with the Python class."""

import sys

import onnxruntime as ort
from onnxruntime.capi import _pybind_state
from onnxruntime.capi.onnxruntime_pybind11_state import (
    InferenceSession,
    get_default_session_options,
)

session = InferenceSession(get_default_session_options(), sys.argv[1], True, False)
session.initialize_session([], [], set())
assert type(session.inputs_meta) is list and isinstance(session, _pybind_state.InferenceSession)
# The Python class's _sess is still an instance of the C module's class.
assert isinstance(ort.InferenceSession(sys.argv[1])._sess, InferenceSession)
