"""The outputs of the models of testdata/generate.py, computed by numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper


def mlp(path: Path, x: np.ndarray) -> np.ndarray:
    """Returns the output of generate.mlp's model at `path`, in fp32."""
    weights = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer
    }
    for layer in range(len(weights) // 2):
        x = np.maximum(x @ weights[f"weight{layer}"] + weights[f"bias{layer}"], 0)
    return x
