"""Writes ONNX models of all kinds into a directory, and what the official onnx package reads in
them as JSON on standard output.

usage: compare.py DIRECTORY [MODEL...]

Given models, those are described as well (graph only; their external data is not loaded). The test
in compare_test.go reads the same files and compares. Needs onnx and numpy.
"""

import hashlib
import json
import os
import sys

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

DIRECTORY = sys.argv[1]
RNG = np.random.default_rng(7)


def info(name, shape=(2, 2), kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def weights(name, shape=(2, 2), dtype=np.float32):
    return numpy_helper.from_array((RNG.standard_normal(shape) * 10).astype(dtype), name)


def external(name, location, offset=None, length=None, shape=(2, 2), fill=True):
    """A tensor whose data is in another file, which is written."""
    t = weights(name, shape)
    raw = t.raw_data
    if fill:
        path = os.path.join(DIRECTORY, location)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "r+b" if os.path.exists(path) else "w+b") as f:
            f.seek(offset or 0)
            f.write(raw)
    set_external_data(
        t, location, offset, length, checksum=hashlib.sha1(raw).hexdigest() if offset == 0 else None
    )
    t.ClearField("raw_data")
    return t


def model(graph, **kw):
    kw.setdefault(
        "opset_imports", [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    )
    kw.setdefault("ir_version", 9)
    return helper.make_model(graph, producer_name="compare", producer_version="1", **kw)


def graph(nodes, initializers=(), inputs=("x",), outputs=("y",), name="g", **kw):
    return helper.make_graph(
        nodes, name, [info(i) for i in inputs], [info(o) for o in outputs], list(initializers), **kw
    )


def branch(name, tensor, nodes=()):
    return helper.make_graph(
        [*nodes, helper.make_node("Identity", [tensor.name], [name + "_out"], name=name + "_id")],
        name,
        [],
        [info(name + "_out")],
        [tensor],
    )


def plain():
    return model(graph([helper.make_node("MatMul", ["x", "w"], ["y"], name="mm")], [weights("w")]))


def subgraphs():
    inner = branch("inner", external("w_inner", "sub.bin", 0, 16))
    body = helper.make_graph(
        [
            helper.make_node("Constant", [], ["k"], name="const", value=weights("k_value")),
            helper.make_node(
                "If",
                ["cond"],
                ["v"],
                then_branch=inner,
                else_branch=branch("inner_else", weights("w_else")),
            ),
        ],
        "body",
        [info("i", [], TensorProto.INT64), info("cond", [], TensorProto.BOOL)],
        [info("cond", [], TensorProto.BOOL), info("v")],
        [weights("w_body")],
    )
    return model(
        graph(
            [
                helper.make_node(
                    "If",
                    ["c"],
                    ["y"],
                    name="if",
                    then_branch=branch("then", weights("w_then")),
                    else_branch=branch("else", external("w_e", "sub.bin", 4096, 16)),
                ),
                helper.make_node("Loop", ["n", "c"], ["z"], name="loop", body=body),
            ],
            [weights("w")],
        )
    )


def functions():
    constant = helper.make_node(
        "Constant", [], ["k"], name="k", value=external("k", "function.bin", 0, 16)
    )
    f = helper.make_function(
        "my",
        "Scale",
        ["a"],
        ["b"],
        [constant, helper.make_node("Mul", ["a", "k"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    f2 = helper.make_function(
        "my",
        "Branch",
        ["c"],
        ["d"],
        [
            helper.make_node(
                "If",
                ["c"],
                ["d"],
                name="if",
                then_branch=branch("t", weights("ft")),
                else_branch=branch("e", weights("fe")),
            )
        ],
        [helper.make_opsetid("", 17)],
        attributes=["alpha"],
        attribute_protos=[helper.make_attribute("table", weights("default_table"))],
    )
    return model(
        graph([helper.make_node("Scale", ["x"], ["y"], domain="my")]),
        functions=[f, f2],
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("my", 1)],
    )


def sparse(name, ext=False):
    values = weights(name, (3,))
    indices = numpy_helper.from_array(np.array([1, 5, 7], np.int64), "")
    if ext:
        values = external(name, "sparse.bin", 0, 12, shape=(3,))
    return helper.make_sparse_tensor(values, indices, [4, 4])


def sparse_tensors():
    g = graph(
        [
            helper.make_node("Constant", [], ["y"], name="c", sparse_value=sparse("in_attribute")),
            helper.make_node(
                "Odd",
                ["x"],
                ["z"],
                name="odd",
                domain="my",
                list=[weights("l0"), external("l1", "list.bin", 0, 16)],
            ),
        ],
        sparse_initializer=[sparse("s"), sparse("s_external", True)],
    )
    return model(g)


def external_data():
    return model(
        graph(
            [helper.make_node("MatMul", ["x", "a"], ["y"])],
            [
                external("a", "weights/a.bin", 0, 16),
                external("b", "weights/a.bin", 4096, 16),
                external("tied", "weights/a.bin", 0, 16),
                external("c", "c.bin"),
                external("d", "./d.bin", 8),
                weights("inline"),
            ],
        )
    )


def typed():
    def t(name, kind, vals):
        return helper.make_tensor(name, kind, [len(vals)], vals)

    return model(
        graph(
            [helper.make_node("Identity", ["x"], ["y"])],
            [
                t("f", TensorProto.FLOAT, [1.5, -2.0]),
                t("d", TensorProto.DOUBLE, [1.5, 2.5, 3.5]),
                t("i32", TensorProto.INT32, [-1, 2, 3]),
                t("i64", TensorProto.INT64, [-1, 1 << 40]),
                t("u64", TensorProto.UINT64, [1 << 63]),
                t("u8", TensorProto.UINT8, [1, 2, 255]),
                t("b", TensorProto.BOOL, [True, False]),
                t("h", TensorProto.FLOAT16, [1.0, 2.0]),
                t("s", TensorProto.STRING, ["one", "two", "zwölf"]),
                t("empty", TensorProto.FLOAT, []),
                t("c", TensorProto.COMPLEX64, [1 + 2j]),
                helper.make_tensor("scalar", TensorProto.FLOAT, [], [3.0]),
                weights("i8", (3, 5), np.int8),
                weights("big", (300, 200)),
            ],
        )
    )


def values():
    g = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "värde",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["batch", None, 3]),
            helper.make_tensor_value_info("unranked", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("scalar", TensorProto.INT8, []),
            helper.make_tensor_sequence_value_info("seq", TensorProto.FLOAT, [1]),
            helper.make_sparse_tensor_value_info("sp", TensorProto.FLOAT, [4, "n"]),
            helper.make_value_info(
                "map",
                helper.make_map_type_proto(
                    TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [1])
                ),
            ),
            helper.make_value_info(
                "opt",
                helper.make_optional_type_proto(
                    helper.make_tensor_type_proto(TensorProto.FLOAT, [1])
                ),
            ),
        ],
        [info("y")],
        doc_string="d" * 5000,
    )
    m = model(g, ir_version=13)
    helper.set_model_props(
        m, {"a": "1", "ep_compatibility_info.TestEP": "{\"v\":1}", "ünïcode": "✓", "empty": ""}
    )
    return m


def context(name="", **attributes):
    return helper.make_node(
        "EPContext", ["x"], ["y"], name=name, domain="com.microsoft", **attributes
    )


def context_embedded():
    return model(
        graph(
            [
                context(
                    "n",
                    source="TestEP",
                    ep_cache_context=RNG.bytes(100000),
                    embed_mode=1,
                    main_context=1,
                    partition_name="p",
                    max_size=12,
                    float_one=0.25,
                    floats=[1.0, 2.0],
                    ints=[1, 2],
                    strings=["a", "b"],
                )
            ]
        )
    )


def context_old():
    return model(graph([context(ep_cache_context=b"\xff\x00old defaults")]), ir_version=8)


def context_sidecar():
    return model(
        graph(
            [
                context(
                    "main",
                    source="QNNExecutionProvider",
                    ep_cache_context="sub/c.bin",
                    embed_mode=0,
                    main_context=1,
                    ep_sdk_version="2.51",
                    is_multi_soc_ep_context=0,
                    notes="n",
                    hardware_architecture="v73",
                    onnx_model_filename="m.onnx",
                ),
                context(
                    "second",
                    source="QNNExecutionProvider",
                    embed_mode=0,
                    main_context=0,
                    partition_name="q",
                ),
                helper.make_node("NonZero", ["y"], ["z"]),
            ],
            [external("fallback", "fallback.bin", 0, 16)],
        )
    )


def context_openvino():
    weights_map = {
        "w0": {"location": "src.data", "data_offset": 0, "size": 16},
        "w1": {"location": "src2.data", "data_offset": 1 << 54, "size": 16},
    }
    inner = helper.make_graph(
        [
            context(
                "inner",
                source="OpenVINOExecutionProvider",
                ep_cache_context="ov.xml",
                embed_mode=0,
                weights_metadata_map=json.dumps(weights_map),
            )
        ],
        "then",
        [],
        [info("y")],
    )
    return model(
        graph(
            [helper.make_node("If", ["c"], ["y"], name="if", then_branch=inner, else_branch=inner)]
        )
    )


def context_dlc():
    return model(
        graph(
            [
                context(
                    "ContextNode",
                    ep_context_type="dlc",
                    ep_dlc_context="model.dlc",
                    source="QAIRTExport",
                )
            ]
        ),
        ir_version=10,
    )


def context_function():
    f = helper.make_function(
        "my",
        "F",
        ["x"],
        ["y"],
        [context("in_function", source="TestEP", ep_cache_context="f.bin", embed_mode=0)],
        [helper.make_opsetid("com.microsoft", 1)],
    )
    return model(graph([helper.make_node("F", ["x"], ["y"], domain="my")]), functions=[f])


def training():
    m = plain()
    t = m.training_info.add()
    t.algorithm.CopyFrom(
        graph(
            [helper.make_node("Identity", ["tw"], ["y"])], [external("tw", "training.bin", 0, 16)]
        )
    )
    return m


def random_model(seed):
    """Nested graphs, all kinds of tensors, in a random arrangement."""
    rng = np.random.default_rng(seed)
    count = [0]

    def tensor():
        count[0] += 1
        n = f"t{count[0]}"
        if rng.random() < 0.3:
            return external(
                n,
                f"random{seed}_{rng.integers(3)}.bin",
                int(rng.integers(4)) * 64 if rng.random() < 0.7 else None,
                16 if rng.random() < 0.7 else None,
            )
        return weights(
            n,
            tuple(int(d) for d in rng.integers(1, 5, rng.integers(0, 4))),
            [np.float32, np.int64, np.float16][rng.integers(3)],
        )

    def part(depth, name):
        nodes = []
        for _ in range(rng.integers(1, 5)):
            count[0] += 1
            label = f"n{count[0]}" if rng.random() < 0.7 else ""
            pick = rng.random()
            if pick < 0.3 and depth < 4:
                nodes.append(
                    helper.make_node(
                        "If",
                        ["c"],
                        ["o"],
                        name=label,
                        then_branch=part(depth + 1, "t"),
                        else_branch=part(depth + 1, "e"),
                    )
                )
            elif pick < 0.5:
                nodes.append(helper.make_node("Constant", [], ["o"], name=label, value=tensor()))
            elif pick < 0.6:
                nodes.append(
                    helper.make_node(
                        "Constant", [], ["o"], name=label, sparse_value=sparse(f"sp{count[0]}")
                    )
                )
            elif pick < 0.7:
                nodes.append(
                    context(
                        label,
                        source="TestEP",
                        embed_mode=int(rng.integers(2)),
                        ep_cache_context=f"c{count[0]}.bin",
                        notes="x" * int(rng.integers(50)),
                    )
                )
            else:
                nodes.append(
                    helper.make_node(
                        ["Add", "Mul", "Relu"][rng.integers(3)],
                        ["a"],
                        ["b"],
                        name=label,
                        domain=["", "my"][rng.integers(2)],
                        alpha=1.0,
                    )
                )
        return graph(nodes, [tensor() for _ in range(rng.integers(0, 5))], name=name)

    return model(part(0, "g"))


# what the onnx package reads


def tensor_facts(t, path, node="", attribute="", part=""):
    d = {
        "name": t.name,
        "graph": path,
        "node": node,
        "attribute": attribute,
        "part": part,
        "type": t.data_type,
        "shape": list(t.dims),
    }
    if t.data_location == TensorProto.EXTERNAL:
        e = {x.key: x.value for x in t.external_data}
        d |= {
            "location": e["location"],
            "offset": int(e.get("offset", 0)),
            "length": int(e.get("length", 0)) or -1,
        }
    elif t.HasField("raw_data"):
        d["sha1"] = hashlib.sha1(t.raw_data).hexdigest()
    elif t.data_type == TensorProto.FLOAT and t.float_data:
        d["sha1"] = hashlib.sha1(np.array(t.float_data, "<f4").tobytes()).hexdigest()
    elif t.data_type == TensorProto.DOUBLE and t.double_data:
        d["sha1"] = hashlib.sha1(np.array(t.double_data, "<f8").tobytes()).hexdigest()
    return d


def sparse_facts(s, path, node="", attribute=""):
    first = tensor_facts(s.values, path, node, attribute, "values")
    second = tensor_facts(s.indices, path, node, attribute, "indices")
    second["name"] = s.indices.name or s.values.name
    return [first, second]


class Facts:
    def __init__(self):
        self.tensors, self.contexts, self.ops, self.nodes = [], [], {}, 0

    def graph(self, g, path):
        for i, n in enumerate(g.node):
            self.node(n, path, i)
        self.tensors += [tensor_facts(t, path) for t in g.initializer]
        for s in g.sparse_initializer:
            self.tensors += sparse_facts(s, path)

    def node(self, n, path, index):
        self.nodes += 1
        op = (n.domain or "ai.onnx") + "::" + n.op_type
        self.ops[op] = self.ops.get(op, 0) + 1
        if n.op_type == "EPContext":
            self.context(n, path)
        label = n.name or f"{n.op_type}[{index}]"
        for a in n.attribute:
            self.attribute(a, path, label)

    def attribute(self, a, path, label):
        sub = "/".join(p for p in (path, ".".join(p for p in (label, a.name) if p)) if p)
        if a.HasField("t"):
            self.tensors.append(tensor_facts(a.t, path, label, a.name))
        self.tensors += [tensor_facts(t, path, label, a.name) for t in a.tensors]
        if a.HasField("sparse_tensor"):
            self.tensors += sparse_facts(a.sparse_tensor, path, label, a.name)
        for s in a.sparse_tensors:
            self.tensors += sparse_facts(s, path, label, a.name)
        if a.HasField("g"):
            self.graph(a.g, sub)
        for i, g in enumerate(a.graphs):
            self.graph(g, f"{sub}[{i}]")

    def context(self, n, path):
        a = {x.name: helper.get_attribute_value(x) for x in n.attribute}
        kinds = {x.name: x.type for x in n.attribute}

        def text(key):
            return a.pop(key, b"").decode()

        c = {
            "node": n.name,
            "graph": path,
            "domain": n.domain,
            "inputs": len(n.input),
            "outputs": len(n.output),
        }
        c |= {
            "embed_mode": a.pop("embed_mode", 1),
            "main_context": a.pop("main_context", 1),
            "max_size": a.pop("max_size", 0),
        }
        for key in (
            "source",
            "partition_name",
            "ep_sdk_version",
            "hardware_architecture",
            "onnx_model_filename",
            "notes",
            "ep_dlc_context",
        ):
            c[key] = text(key)
        cache = a.pop("ep_cache_context", b"")
        c["cache"] = cache.decode() if c["embed_mode"] == 0 else ""
        c["inline_sha1"] = hashlib.sha1(cache).hexdigest() if c["embed_mode"] and cache else ""
        c["weights"] = (
            sorted({w["location"] for w in json.loads(a["weights_metadata_map"]).values()})
            if "weights_metadata_map" in a
            else []
        )
        c["others"] = {
            k: (v.decode() if kinds[k] == AttributeProto.STRING else f"{v:g}")
            for k, v in a.items()
            if kinds[k] in (AttributeProto.STRING, AttributeProto.INT, AttributeProto.FLOAT)
        }
        c["long"] = sorted(
            k
            for k in a
            if kinds[k] not in (AttributeProto.STRING, AttributeProto.INT, AttributeProto.FLOAT)
        )
        self.contexts.append(c)


def value_facts(v):
    kind = (v.type.WhichOneof("value") or "").removesuffix("_type")
    d = {"name": v.name, "kind": kind, "type": 0, "shape": []}
    if kind in ("tensor", "sparse_tensor"):
        t = getattr(v.type, kind + "_type")
        d["type"] = t.elem_type
        d["shape"] = [
            [x.dim_value if x.HasField("dim_value") else -1, x.dim_param] for x in t.shape.dim
        ]
    return d


def describe(path):
    m = onnx.load(path, load_external_data=False)
    f = Facts()
    f.graph(m.graph, "")
    for i, t in enumerate(m.training_info):
        f.graph(t.initialization, f"training_info[{i}].initialization")
        f.graph(t.algorithm, f"training_info[{i}].algorithm")
    for fn in m.functions:
        where = f"function {fn.domain or 'ai.onnx'}::{fn.name}" + (
            ":" + fn.overload if fn.overload else ""
        )
        for i, n in enumerate(fn.node):
            f.node(n, where, i)
        for a in fn.attribute_proto:
            f.attribute(a, where, "")

    def order(d):
        return json.dumps(d, sort_keys=True)

    return {
        "ir": m.ir_version,
        "opsets": [[o.domain or "ai.onnx", o.version] for o in m.opset_import],
        "producer": m.producer_name,
        "producer_version": m.producer_version,
        "graph": m.graph.name,
        "metadata": {p.key: p.value for p in m.metadata_props},
        "inputs": [value_facts(v) for v in m.graph.input],
        "outputs": [value_facts(v) for v in m.graph.output],
        "tensors": sorted(f.tensors, key=order),
        "contexts": f.contexts,
        "ops": f.ops,
        "nodes": f.nodes,
    }


def main():
    os.makedirs(DIRECTORY, exist_ok=True)
    kinds = [
        plain,
        subgraphs,
        functions,
        sparse_tensors,
        external_data,
        typed,
        values,
        context_embedded,
        context_old,
        context_sidecar,
        context_openvino,
        context_dlc,
        context_function,
        training,
    ]
    paths = []
    for kind in kinds:
        paths.append(os.path.join(DIRECTORY, kind.__name__ + ".onnx"))
        onnx.save(kind(), paths[-1])
    for seed in range(30):
        paths.append(os.path.join(DIRECTORY, f"random{seed}.onnx"))
        onnx.save(random_model(seed), paths[-1])
    json.dump({p: describe(p) for p in paths + sys.argv[2:]}, sys.stdout)


main()
