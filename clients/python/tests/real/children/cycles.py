"""One process that repeatedly acquires, loads and closes many models of one shape. OpenVINO keeps a
context binary open as long as any of its sessions exists. So that descriptor numbers repeat, views
are moved to a few numbers, and all sessions are dropped from time to time.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import epcache
import generate
import inference
import numpy as np
import onnx
import onnxruntime as ort
import reference
from onnx import numpy_helper

EP = "OpenVINOExecutionProvider"
# So that numpy and the provider differ only by rounding.
EXACT = {"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'}
WIDTH, LAYERS = 64, 2
KEPT_AT_MOST = 12
# Far above the numbers that the kernel assigns. Three, so that a number is reused soon, but not
# always at once.
NUMBERS = (900, 901, 902)


def run(
    socket: str,
    state: str,
    directory: str,
    how: str,
    seed: int,
    cycles: int,
    models: int,
    damages: int,
) -> dict[str, Any]:
    return Cycles(socket, state, directory, how, seed, models).run(cycles, damages)


class Kept:
    """A session that is kept, with or without its lease."""

    def __init__(
        self, model: int, session: ort.InferenceSession, lease: epcache.Artefact | None
    ) -> None:
        self.model, self.session, self.lease = model, session, lease
        # its model's stored bytes were changed while it was open, so its outputs are undefined
        self.damaged = False

    def drop(self) -> None:
        del self.session
        if self.lease is not None:
            self.lease.close()


class Cycles:
    def __init__(
        self, socket: str, state: str, directory: str, how: str, seed: int, models: int
    ) -> None:
        self.client = epcache.Client(socket)
        self.state, self.how = Path(state), how
        self.random = random.Random(seed)
        self.input = np.random.default_rng(seed).standard_normal((1, WIDTH), dtype=np.float32)
        self.paths = [Path(directory) / f"{number}.onnx" for number in range(models)]
        for number, path in enumerate(self.paths):
            generate.mlp(path, WIDTH, LAYERS, seed=1000 + number)
        self.expected = [reference.mlp(path, self.input) for path in self.paths]
        self.files: dict[int, list[epcache.File]] = {}  # of the latest build, by model
        self.last: dict[int, int] = {}  # by model, the descriptor number with which it was loaded
        self.kept: list[Kept] = []
        self.mistakes: list[str] = []
        self.outcomes: Counter[str] = Counter()
        # the models of each descriptor number
        self.numbers: defaultdict[int, set[int]] = defaultdict(set)

    def run(self, cycles: int, damages: int) -> dict[str, Any]:
        # Not at the beginning, because there must be builds to damage, and open sessions.
        when = set(self.random.sample(range(cycles // 4, cycles), damages))
        for cycle in range(cycles):
            if cycle in when:
                # Preferably one with an open session, because the provider's copy of it must not be
                # used after the recompile.
                alive = [one.model for one in self.kept]
                self.cycle(cycle, self.random.choice(alive or sorted(self.files)), damage=True)
            else:
                self.cycle(cycle, self.random.randrange(len(self.paths)), damage=False)
            if cycle % 20 == 19:
                self.check_kept(cycle)
        return {
            "mistakes": self.mistakes,
            "outcomes": self.outcomes,
            "numbers": {number: len(models) for number, models in self.numbers.items()},
        }

    def cycle(self, cycle: int, model: int, damage: bool) -> None:
        if damage:
            self.damage(model)
        outcome, session, lease = self.open(model)
        self.outcomes["healed" if damage and outcome == "compiled" else outcome] += 1
        if damage and outcome != "compiled":
            self.mistakes.append(
                f"cycle {cycle}: model {model} was damaged in the store, and its request was a "
                f"{outcome}"
            )
        self.check(f"cycle {cycle}, {outcome}", model, session)
        one = Kept(model, session, lease)
        if self.random.random() < 0.5:
            self.kept.append(one)
            # An application should keep the lease of an open session, but one that releases it must
            # not get a wrong model either.
            if lease is not None and self.random.random() < 0.5:
                lease.close()
        else:
            one.drop()
        if len(self.kept) > KEPT_AT_MOST:
            self.kept.pop(self.random.randrange(len(self.kept))).drop()
        if self.random.random() < 0.05:
            while self.kept:
                self.kept.pop().drop()

    def open(self, model: int) -> tuple[str, ort.InferenceSession, epcache.Artefact | None]:
        if self.how == "session":
            session = epcache.InferenceSession(
                self.paths[model], ep=(f"{EP}:CPU", EXACT), client=self.client
            )
            self.numbers[int(session.epcache.path.split("/")[4])].add(model)
            with self.client.acquire(
                self.paths[model],
                (f"{EP}:CPU", EXACT),
                graph_optimization_level="basic",
                on_miss="fail",
            ) as again:
                self.files[model] = again.files
            return session.epcache.outcome, session, None
        artefact = self.client.acquire(self.paths[model], (f"{EP}:CPU", EXACT))
        assert artefact.fd is not None
        self.files[model] = artefact.files
        path = artefact.view_path
        if self.how == "descriptor":
            # The lease is a lock of the open directory: it ends when the last descriptor is closed.
            number = os.dup2(artefact.fd, self.number(model))
            path = f"/proc/self/fd/{number}/{artefact.graph}"
            self.numbers[number].add(model)
        settings = inference.session_options(EP, artefact.provider_options[EP], {})
        return artefact.outcome, ort.InferenceSession(path, settings, enable_fallback=0), artefact

    def number(self, model: int) -> int:
        """Returns the descriptor number for a load: half of the time that of the model's last
        session.
        """
        if model not in self.last or self.random.random() < 0.5:
            self.last[model] = self.random.choice(NUMBERS)
        return self.last[model]

    def damage(self, model: int) -> None:
        """Changes one byte of a weight in the stored binary, in place: sign and exponent, so that
        the output differs.
        """
        digest = next(file.digest for file in self.files[model] if file.name.endswith(".bin"))
        weights = numpy_helper.to_array(onnx.load(self.paths[model]).graph.initializer[0]).tobytes()
        with open(self.state / "objects" / digest[:2] / digest, "r+b") as file:
            data = file.read()
            at = data.index(weights) + 4 * self.random.randrange(WIDTH * WIDTH) + 3
            file.seek(at)
            file.write(bytes([data[at] ^ 0x41]))
        for one in self.kept:
            one.damaged = one.damaged or one.model == model

    def check_kept(self, cycle: int) -> None:
        for one in self.kept:
            if not one.damaged:
                self.check(f"kept until cycle {cycle}", one.model, one.session)

    def check(self, when: str, model: int, session: ort.InferenceSession) -> None:
        got = session.run(None, {"x": self.input})[0]
        if np.allclose(got, self.expected[model], rtol=1e-4, atol=1e-4):
            return
        others = [
            n
            for n, other in enumerate(self.expected)
            if np.allclose(got, other, rtol=1e-4, atol=1e-4)
        ]
        self.mistakes.append(
            f"{when}: model {model} computed "
            + (f"what model {others[0]} does" if others else "what none does")
        )
