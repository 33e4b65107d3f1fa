package watch_test

import (
	"fmt"

	"github.com/epcached/epcached/internal/watch"
)

func ExampleWatcher() {
	w := watch.New(watch.Options{})
	defer w.Close()
	w.Set("openvino", []string{"/opt/ort/current/libonnxruntime.so", "/opt/ort/current/openvino"})
	w.Set("intel_vpu", []string{"/sys/module/intel_vpu/version"})
	fmt.Println(w.Mode("intel_vpu"))

	for e := range w.Events() {
		switch e.Kind {
		case watch.Changing:
			fmt.Println(e.Subject, "is being replaced: nothing is believed of it")
		case watch.Settled:
			fmt.Println(e.Subject, "is at rest")
		}
	}
}
