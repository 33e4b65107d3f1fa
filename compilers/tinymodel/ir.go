package tinymodel

import "fmt"

// IR gives a model in OpenVINO's own format, y = Relu(x W), with W of n rows and columns that
// follow from the seed: what its .xml file holds, and what the .bin file beside it does.
func IR(seed uint64, n int) (xml, bin []byte) {
	tensor := func(id, rows int) string {
		return fmt.Sprintf(`<port id="%d" precision="FP32"><dim>%d</dim><dim>%d</dim></port>`, id, rows, n)
	}
	named := func(id int, name string) string {
		return fmt.Sprintf(`<port id="%d" precision="FP32" names="%s"><dim>1</dim><dim>%d</dim></port>`, id, name, n)
	}
	return fmt.Appendf(nil, `<?xml version="1.0"?>
<net name="model" version="11">
 <layers>
  <layer id="0" name="x" type="Parameter" version="opset1">
   <data shape="1,%[1]d" element_type="f32"/><output>%[3]s</output></layer>
  <layer id="1" name="w" type="Const" version="opset1">
   <data element_type="f32" shape="%[1]d, %[1]d" offset="0" size="%[2]d"/><output>%[4]s</output></layer>
  <layer id="2" name="product" type="MatMul" version="opset1">
   <data transpose_a="false" transpose_b="false"/><input>%[5]s%[6]s</input><output>%[7]s</output></layer>
  <layer id="3" name="relu" type="ReLU" version="opset1"><input>%[5]s</input><output>%[8]s</output></layer>
  <layer id="4" name="y/sink" type="Result" version="opset1"><input>%[5]s</input></layer>
 </layers>
 <edges>
  <edge from-layer="0" from-port="0" to-layer="2" to-port="0"/>
  <edge from-layer="1" from-port="0" to-layer="2" to-port="1"/>
  <edge from-layer="2" from-port="2" to-layer="3" to-port="0"/>
  <edge from-layer="3" from-port="1" to-layer="4" to-port="0"/>
 </edges>
</net>
`, n, n*n*4, named(0, "x"), tensor(0, n), tensor(0, 1), tensor(1, n), tensor(2, 1), named(1, "y")), Floats(seed, n*n)
}

// WrapsIR is an ONNX model of one EPContext node that names a model as IR gives it, as Olive's pass
// for OpenVINO writes it.
func WrapsIR(xml string, n int) Model {
	return Model{
		Nodes: []Node{{Name: "ContextNode", Op: "EPContext", Domain: "com.microsoft", Inputs: []string{"x"}, Outputs: []string{"y"},
			Attributes: map[string]any{"embed_mode": int64(0), "main_context": int64(1), "ep_cache_context": xml, "partition_name": "model",
				"source": "OpenVINOExecutionProvider", "ep_sdk_version": "2026.4"}}},
		Inputs:  []Value{{Name: "x", Type: Float, Shape: []any{1, n}}},
		Outputs: []Value{{Name: "y", Type: Float, Shape: []any{1, n}}},
		Opsets:  map[string]int64{"": 17, "com.microsoft": 1},
	}
}
