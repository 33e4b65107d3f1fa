"""Weight-sharing groups in an application: several in one process, and their models alone."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import epcache
import generate
import numpy as np
import reference

EP = (
    "OpenVINOExecutionProvider:CPU",
    {"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'},
)
WIDTH, BATCHES = 64, (1, 2, 4)


def run(socket: str, directory: str, what: str) -> Any:
    warnings.simplefilter("error", epcache.EpcacheWarning)
    made = [group(Path(directory) / str(seed), seed) for seed in (1, 2)]
    with epcache.Client(socket) as client:
        return {"together": together, "alone": alone, "refused": refused}[what](client, made)


def group(directory: Path, seed: int) -> list[Path]:
    """Writes variants of one model; groups with other seeds have the same names and shapes."""
    directory.mkdir()
    paths = [directory / f"rows{batch}.onnx" for batch in BATCHES]
    for path, batch in zip(paths, BATCHES, strict=True):
        generate.mlp(path, WIDTH, 2, seed=seed, batch=batch)
    return paths


def right(session: Any, path: Path) -> bool:
    batch = session.get_inputs()[0].shape[0]
    x = np.random.default_rng(batch).standard_normal((batch, WIDTH), dtype=np.float32)
    (y,) = session.run(None, {"x": x})
    return bool(np.allclose(y, reference.mlp(path, x), rtol=1e-4, atol=1e-4))


def together(client: epcache.Client, groups: list[list[Path]]) -> dict[str, Any]:
    """All groups are open at once; each is closed in reverse order while another one computes."""
    loaded = [epcache.SessionGroup(paths, ep=EP, client=client) for paths in groups]
    answer: dict[str, Any] = {
        "outcomes": [[s.epcache.outcome for s in one] for one in loaded],
        "builds": [len({s.epcache.build for s in one}) for one in loaded],
        "directories": [len({os.path.dirname(s.epcache.path) for s in one}) for one in loaded],
        "right": [
            right(s, p)
            for one, paths in zip(loaded, groups, strict=True)
            for s, p in zip(one, paths, strict=True)
        ],
    }
    loaded[0].close()
    answer["after"] = [right(s, p) for s, p in zip(loaded[1], groups[1], strict=True)]
    loaded[1].close()
    with epcache.SessionGroup(groups[0], ep=EP, client=client) as again:
        answer["again"] = [s.epcache.outcome for s in again]
        answer["right again"] = [right(s, p) for s, p in zip(again, groups[0], strict=True)]
    views = [name for name in map(_read, Path("/proc/self/fd").iterdir()) if "/views/" in name]
    return {**answer, "leases": len(views)}


def _read(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""  # the descriptor of the listing itself


def alone(client: epcache.Client, groups: list[list[Path]]) -> dict[str, Any]:
    """A model that was compiled in a group is served to a request for it alone."""
    with epcache.SessionGroup(groups[0], ep=EP, client=client) as loaded:
        build = loaded[0].epcache.build
    sessions = [epcache.InferenceSession(path, ep=EP, client=client) for path in groups[0]]
    return {
        "outcomes": [s.epcache.outcome for s in sessions],
        "same": all(s.epcache.build == build for s in sessions),
        "right": [right(s, p) for s, p in zip(sessions, groups[0], strict=True)],
    }


class Spoiling(epcache.Client):
    """Truncates the first answer's shared binary before it is loaded."""

    state = Path()
    done = False

    def acquire(self, *arguments: Any, **wishes: Any) -> epcache.Artefact:
        artefact = super().acquire(*arguments, **wishes)
        if not self.done:
            self.done = True
            for file in artefact.files:
                if not file.name.endswith(".onnx"):
                    os.truncate(
                        self.state / "objects" / file.digest[:2] / file.digest, file.size // 2
                    )
        return artefact


def refused(client: epcache.Client, groups: list[list[Path]]) -> dict[str, Any]:
    """A group that does not load is reported, and the one compiled instead is loaded as a whole."""
    assert client._connections.socket is not None
    spoiling = Spoiling(client._connections.socket)
    spoiling.state = Path(client._connections.socket).parent / "state"
    with epcache.SessionGroup(groups[0], ep=EP, client=spoiling) as loaded:
        return {
            "outcomes": [s.epcache.outcome for s in loaded],
            "decisions": [d.decision for d in loaded[0].epcache.decisions],
            "right": [right(s, p) for s, p in zip(loaded, groups[0], strict=True)],
        }
