"""A decoder transformer with random weights, the same bytes every time: its prefill and decode
forms, and fine-tunes of it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper, save

from generate import IR_VERSION, OPSET

HEAD = 64


class Decoder:
    """Writes graphs of one transformer: pre-norm layers of attention and feed-forward, a vocabulary
    at either end.

    Weights depend on `seed`, and for the layers in `tuned` on `tune` as well: a fine-tune changes
    these layers and nothing else. Shapes are fixed, because NPUs need that.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        vocabulary: int,
        seed: int = 0,
        tuned: frozenset[int] = frozenset(),
        tune: int = 0,
    ):
        self.width, self.layers, self.vocabulary, self.seed = width, layers, vocabulary, seed
        self.tuned, self.tune = tuned, tune

    def write(self, path: Path, tokens: int, past: int, batch: int = 1) -> None:
        """Writes the form for `tokens` new tokens after `past` earlier ones, whose keys and values
        are inputs.
        """
        self.nodes: list = []
        self.weights: list = []
        inputs = [helper.make_tensor_value_info("tokens", TensorProto.INT64, [batch, tokens])]
        outputs = [
            helper.make_tensor_value_info(
                "logits", TensorProto.FLOAT, [batch, tokens, self.vocabulary]
            )
        ]
        heads = self.width // HEAD
        embedding = self.weight("embedding", -1, self.vocabulary, self.width)
        x = self.node("Gather", [embedding, "tokens"])
        # Positions from `past` on see all before them and themselves.
        mask = np.triu(np.full((tokens, past + tokens), -1e4, np.float32), k=past + 1)
        self.weights.append(numpy_helper.from_array(mask, "mask"))
        for layer in range(self.layers):
            keys = values = None
            if past:
                keys, values = f"past_key{layer}", f"past_value{layer}"
                for name in (keys, values):
                    inputs.append(
                        helper.make_tensor_value_info(
                            name, TensorProto.FLOAT, [batch, heads, past, HEAD]
                        )
                    )
            x = self.attention(layer, x, batch, tokens, keys, values, outputs, past)
            x = self.feed_forward(layer, x)
        x = self.node(
            "MatMul",
            [self.norm("final", -1, x), self.weight("head", -1, self.width, self.vocabulary)],
        )
        self.nodes.append(helper.make_node("Identity", [x], ["logits"]))
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.weights)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="epcached testdata",
        )
        checker.check_model(model)
        save(model, path)

    def attention(
        self,
        layer: int,
        x: str,
        batch: int,
        tokens: int,
        keys: str | None,
        values: str | None,
        outputs: list,
        past: int,
    ) -> str:
        heads, name = self.width // HEAD, f"layer{layer}."
        normed = self.norm(name + "norm1", layer, x)
        parts = {}
        for part in ("query", "key", "value"):
            y = self.node(
                "MatMul", [normed, self.weight(name + part, layer, self.width, self.width)]
            )
            y = self.node("Reshape", [y, self.shape(batch, tokens, heads, HEAD)])
            parts[part] = self.node("Transpose", [y], perm=[0, 2, 1, 3])
        if keys and values:
            parts["key"] = self.node("Concat", [keys, parts["key"]], axis=2)
            parts["value"] = self.node("Concat", [values, parts["value"]], axis=2)
        for part in ("key", "value"):
            self.nodes.append(
                helper.make_node("Identity", [parts[part]], [f"present_{part}{layer}"])
            )
            outputs.append(
                helper.make_tensor_value_info(
                    f"present_{part}{layer}", TensorProto.FLOAT, [batch, heads, past + tokens, HEAD]
                )
            )
        scores = self.node(
            "MatMul", [parts["query"], self.node("Transpose", [parts["key"]], perm=[0, 1, 3, 2])]
        )
        scores = self.node(
            "Add", [self.node("Mul", [scores, self.constant("scale", HEAD**-0.5)]), "mask"]
        )
        y = self.node("MatMul", [self.node("Softmax", [scores], axis=-1), parts["value"]])
        y = self.node(
            "Reshape",
            [self.node("Transpose", [y], perm=[0, 2, 1, 3]), self.shape(batch, tokens, self.width)],
        )
        return self.node(
            "Add",
            [x, self.node("MatMul", [y, self.weight(name + "out", layer, self.width, self.width)])],
        )

    def feed_forward(self, layer: int, x: str) -> str:
        name = f"layer{layer}."
        y = self.node(
            "MatMul",
            [
                self.norm(name + "norm2", layer, x),
                self.weight(name + "up", layer, self.width, 4 * self.width),
            ],
        )
        y = self.node("Mul", [y, self.node("Sigmoid", [y])])
        return self.node(
            "Add",
            [
                x,
                self.node(
                    "MatMul", [y, self.weight(name + "down", layer, 4 * self.width, self.width)]
                ),
            ],
        )

    def norm(self, name: str, layer: int, x: str) -> str:
        return self.node(
            "LayerNormalization",
            [
                x,
                self.weight(name + ".scale", layer, self.width),
                self.weight(name + ".bias", layer, self.width),
            ],
            axis=-1,
        )

    def node(self, kind: str, inputs: list[str], **attributes: object) -> str:
        output = f"v{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(kind, inputs, [output], name=f"{kind}{len(self.nodes)}", **attributes)
        )
        return output

    def weight(self, name: str, layer: int, *shape: int) -> str:
        tune = self.tune if layer in self.tuned else 0
        # By name and shape, so that no weight depends on the order of creation.
        random = np.random.default_rng([self.seed, tune, *shape, *name.encode()])
        data = random.standard_normal(shape, dtype=np.float32) * np.float32(shape[0] ** -0.5)
        self.weights.append(numpy_helper.from_array(data, name))
        return name

    def shape(self, *shape: int) -> str:
        name = "shape_" + "x".join(map(str, shape))
        if all(w.name != name for w in self.weights):
            self.weights.append(numpy_helper.from_array(np.array(shape, np.int64), name))
        return name

    def constant(self, name: str, value: float) -> str:
        if all(w.name != name for w in self.weights):
            self.weights.append(numpy_helper.from_array(np.float32(value), name))
        return name
