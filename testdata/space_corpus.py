"""Builds the corpus of `make bench-space` with real compilers: space_corpus.py DIR [NAME...].

DIR gets a directory NAME for each artefact below, with the files that OpenVINO's or QNN's compiler
made, and the list corpus.json. Existing artefacts are kept, so that a second run is fast. It needs
1.2 GB and about ten minutes. EPCACHED_RUNTIMES and EPCACHED_MODELS are set by make.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

QNN = {"qnn": "qnn-2.7.0", "older qnn": "qnn-2.5.0"}
OPENVINO = {"openvino": "openvino-1.8.1", "older openvino": "openvino-1.8.0-ort-1.28.0"}
RUNTIMES = QNN | OPENVINO
GENERATION = 2  # is incremented when the generated models get other bytes


@dataclass(frozen=True)
class Decoder:
    """A form of the generated transformer: see transformer.py."""

    tokens: int
    past: int
    batch: int = 1
    tuned: tuple[int, ...] = ()
    tune: int = 0
    width: int = 768
    layers: int = 6


@dataclass(frozen=True)
class Mlp:
    batch: int
    width: int = 2048
    layers: int = 4


@dataclass(frozen=True)
class Real:
    """A real model with its free dimensions fixed."""

    name: str
    dimensions: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Artefact:
    name: str
    compiler: str  # of RUNTIMES
    models: tuple[Decoder | Mlp | Real, ...]  # more than one: they share weights
    why: str


def one(name: str, compiler: str, model: Decoder | Mlp | Real, why: str) -> Artefact:
    return Artefact(name, compiler, (model,), why)


def small(tokens: int, past: int) -> Decoder:
    return Decoder(tokens, past, width=512, layers=4)


TEXT = {"batch_size": 1, "sequence_length": 128}
PICTURE = {"DynamicDimension.0": 1, "DynamicDimension.1": 320, "DynamicDimension.2": 320}

# In the order in which they are stored: as in a user's week, bases before derived models.
ARTEFACTS = [
    one("openvino-decoder-prefill64", "openvino", Decoder(64, 0), "base"),
    one("openvino-decoder-decode", "openvino", Decoder(1, 127), "prefill and decode"),
    one("openvino-decoder-prefill128", "openvino", Decoder(128, 0), "sequence length"),
    one(
        "openvino-decoder-tuned",
        "openvino",
        Decoder(64, 0, tuned=(4, 5), tune=1),
        "fine-tune: two of six layers",
    ),
    one(
        "older-openvino-decoder-prefill64", "older openvino", Decoder(64, 0), "another SDK version"
    ),
    one("qnn-decoder-prefill64", "qnn", Decoder(64, 0), "base"),
    one("qnn-decoder-decode", "qnn", Decoder(1, 127), "prefill and decode"),
    one(
        "qnn-decoder-tuned",
        "qnn",
        Decoder(64, 0, tuned=(5,), tune=2),
        "fine-tune: one of six layers",
    ),
    one("older-qnn-decoder-decode", "older qnn", Decoder(1, 127), "another SDK version"),
    one("qnn-small-prefill64", "qnn", small(64, 0), "apart from the group"),
    one("qnn-small-decode", "qnn", small(1, 127), "apart from the group"),
    Artefact(
        "qnn-small-group", "qnn", (small(64, 0), small(1, 127)), "weights shared by the compiler"
    ),
    one("qnn-mlp-batch1", "qnn", Mlp(1), "batch size"),
    one("qnn-mlp-batch4", "qnn", Mlp(4), "batch size"),
    one("openvino-minilm-128", "openvino", Real("minilm-fp32", TEXT), "sequence length"),
    one(
        "openvino-minilm-32",
        "openvino",
        Real("minilm-fp32", TEXT | {"sequence_length": 32}),
        "sequence length",
    ),
    one(
        "openvino-minilm-batch4",
        "openvino",
        Real("minilm-fp32", TEXT | {"batch_size": 4}),
        "batch size",
    ),
    one("qnn-minilm-batch1", "qnn", Real("minilm-fp32", TEXT), "batch size"),
    one("qnn-minilm-batch4", "qnn", Real("minilm-fp32", TEXT | {"batch_size": 4}), "batch size"),
    one("openvino-detector-320", "openvino", Real("rapidocr-det", PICTURE), "picture size"),
    one(
        "openvino-detector-640",
        "openvino",
        Real("rapidocr-det", PICTURE | {"DynamicDimension.1": 640, "DynamicDimension.2": 640}),
        "picture size",
    ),
    one("qnn-detector-320", "qnn", Real("rapidocr-det", PICTURE), "picture size"),
    one(
        "qnn-detector-640",
        "qnn",
        Real("rapidocr-det", PICTURE | {"DynamicDimension.1": 640, "DynamicDimension.2": 640}),
        "picture size",
    ),
    one("openvino-magika-batch1", "openvino", Real("magika", {"unk__214": 1}), "batch size"),
    one("openvino-magika-batch4", "openvino", Real("magika", {"unk__214": 4}), "batch size"),
    one("openvino-turn-batch1", "openvino", Real("smart-turn", {"s6": 1}), "batch size, int8"),
    one("openvino-turn-batch2", "openvino", Real("smart-turn", {"s6": 2}), "batch size, int8"),
]


def main(arguments: list[str]) -> int:
    if not arguments:
        print("usage: space_corpus.py DIR [NAME...]", file=sys.stderr)
        return 2
    if arguments[0] == "--compile":
        compile_in(Path(arguments[1]), json.loads(arguments[2]))
        return 0
    root = Path(arguments[0])
    root.mkdir(parents=True, exist_ok=True)
    unknown = set(arguments[1:]) - {a.name for a in ARTEFACTS}
    if unknown:
        print(f"space_corpus: no such artefact: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    failed = 0
    for artefact in ARTEFACTS:
        if arguments[1:] and artefact.name not in arguments[1:]:
            continue
        failed += not make(root, artefact)
    write_list(root)
    return 1 if failed else 0


def description(artefact: Artefact) -> str:
    return json.dumps(asdict(artefact) | {"generation": GENERATION}, sort_keys=True) + "\n"


def make(root: Path, artefact: Artefact) -> bool:
    directory = root / artefact.name
    try:
        if (directory / ".made-from").read_text() == description(artefact):
            return True
    except FileNotFoundError:
        pass
    work = root / f".{artefact.name}-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        start = time.monotonic()
        job = prepare(work, artefact)
        runtime = Path(os.environ["EPCACHED_RUNTIMES"]) / RUNTIMES[artefact.compiler]
        environment = os.environ | {"PYTHONPATH": str(runtime)}
        done = subprocess.run(
            [sys.executable, __file__, "--compile", str(work), json.dumps(job)],
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0 or not list((work / "out").glob("*_ctx.onnx")):
            print(
                f"space_corpus: {artefact.name}: exit {done.returncode}: "
                f"{(done.stderr or done.stdout)[-2000:]}",
                file=sys.stderr,
            )
            return False
        (work / "out" / ".made-from").write_text(description(artefact))
        shutil.rmtree(directory, ignore_errors=True)
        (work / "out").rename(directory)
        size = sum(f.stat().st_size for f in files(directory))
        print(
            f"{artefact.name}: {size / 1e6:.1f} MB in {time.monotonic() - start:.0f} s", flush=True
        )
        return True
    finally:
        shutil.rmtree(work, ignore_errors=True)


def prepare(work: Path, artefact: Artefact) -> dict[str, object]:
    """Writes the models, and returns the compiler's arguments."""
    import generate
    import transformer

    graphs, dimensions = [], {}
    for number, model in enumerate(artefact.models):
        path = work / (artefact.name + ("" if number == 0 else f"-{number + 1}") + ".onnx")
        match model:
            case Decoder():
                decoder = transformer.Decoder(
                    model.width,
                    model.layers,
                    8192,
                    seed=1,
                    tuned=frozenset(model.tuned),
                    tune=model.tune,
                )
                decoder.write(path, model.tokens, model.past, model.batch)
            case Mlp():
                generate.mlp(path, model.width, model.layers, seed=9, batch=model.batch)
            case Real():
                models = Path(os.environ["EPCACHED_MODELS"])
                listed = json.loads((models / "models.json").read_text())["models"]
                shutil.copy(
                    models / next(m["path"] for m in listed if m["name"] == model.name), path
                )
                dimensions |= model.dimensions
        graphs.append(str(path))
    return {
        "graphs": graphs,
        "dimensions": dimensions,
        "kind": "qnn" if artefact.compiler in QNN else "openvino",
    }


def compile_in(work: Path, job: dict) -> None:
    """Runs in a child process with one runtime first in its path."""
    import onnxruntime as ort

    ort.set_default_logger_severity(4)
    options: dict[str, str] = {}
    if job["kind"] == "qnn":
        import onnxruntime_qnn

        name, library = (
            "QNNExecutionProvider",
            next(Path(onnxruntime_qnn.__file__).parent.rglob("libonnxruntime_providers_qnn.so")),
        )
        options = {
            "backend_path": str(library.with_name("libQnnHtp.so")),
            "soc_model": "60",
            "enable_htp_fp16_precision": "1",
        }
    else:
        import onnxruntime_ep_openvino

        name, library = (
            "OpenVINOExecutionProvider",
            Path(onnxruntime_ep_openvino.get_library_path()),
        )
    ort.register_execution_provider_library(name, str(library))
    device = next(d for d in ort.get_ep_devices() if d.ep_name == name)
    out = work / "out"
    out.mkdir()
    graphs = [Path(g) for g in job["graphs"]]
    if len(graphs) > 1:
        compile_group(ort, device, options | {"enable_htp_weight_sharing": "1"}, graphs, out)
        return
    settings = ort.SessionOptions()
    for dimension, size in job["dimensions"].items():
        settings.add_free_dimension_override_by_name(dimension, size)
    settings.add_provider_for_devices([device], options)
    compiler = ort.ModelCompiler(settings, str(graphs[0]), embed_compiled_data_into_model=False)
    compiler.compile_to_file(str(out / (graphs[0].stem + "_ctx.onnx")))


def compile_group(ort, device, options: dict[str, str], graphs: list[Path], out: Path) -> None:
    """Compiles a group by sessions that are all open at once, because only those share weights.
    The compile API ends each session before the next begins.
    """
    sessions = []
    for graph in graphs:
        settings = ort.SessionOptions()
        settings.add_session_config_entry("ep.context_enable", "1")
        settings.add_session_config_entry("ep.context_embed_mode", "0")
        settings.add_session_config_entry(
            "ep.context_file_path", str(out / (graph.stem + "_ctx.onnx"))
        )
        settings.add_session_config_entry("ep.share_ep_contexts", "1")
        if graph == graphs[-1]:
            settings.add_session_config_entry("ep.stop_share_ep_contexts", "1")
        settings.add_provider_for_devices([device], options)
        sessions.append(ort.InferenceSession(str(graph), sess_options=settings))
    sys.stdout.flush()
    # without destroying the sessions, because the files are written and QNN's cleanup is not needed
    os._exit(0)


def files(directory: Path) -> list[Path]:
    return sorted(f for f in directory.iterdir() if f.is_file() and not f.name.startswith("."))


def write_list(root: Path) -> None:
    listed = []
    for artefact in ARTEFACTS:
        directory = root / artefact.name
        if directory.is_dir():
            listed.append(
                {
                    "name": artefact.name,
                    "why": artefact.why,
                    "compiler": RUNTIMES[artefact.compiler],
                    "files": [
                        {"path": str(f.relative_to(root)), "size": f.stat().st_size}
                        for f in files(directory)
                    ],
                }
            )
    temporary = root / f".corpus.json.{os.getpid()}"
    temporary.write_text(json.dumps({"artefacts": listed}, indent=1) + "\n")
    temporary.replace(root / "corpus.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
