//go:build linux && (amd64 || arm64)

package main

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/workerproto"
)

var semantic = regexp.MustCompile(
	`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?$`)

var pluginLibrary = []guideline{
	required("CreateEpFactories and GetSupportedDevices: the library registers, and lists "+
		"devices under the EP's name", func(c *testCase) {
		c.register(c.ep.Name)
		c.lists(c.ep.Name)
	}).unregistered(),
	recommended("GetName ends in ExecutionProvider", func(c *testCase) {
		c.check("name of the EP's devices", "...ExecutionProvider", c.ep.Name,
			strings.HasSuffix(c.ep.Name, "ExecutionProvider"))
	}),
	required("GetVendor is not empty", func(c *testCase) {
		for _, d := range c.devices {
			c.check("vendor of the EP of device "+d.Type, "a name", d.EPVendor, d.EPVendor != "")
		}
	}),
	required("GetVersion is a semantic version", func(c *testCase) {
		for _, d := range c.devices {
			version := d.EPMetadata["version"]
			c.check("metadata \"version\" of device "+d.Type, "MAJOR.MINOR.PATCH", version,
				semantic.MatchString(version))
		}
	}),
	recommended("the registration name can be anything: the EP keeps its name", func(c *testCase) {
		c.register("registered_by_epcached")
		c.lists(c.ep.Name)
	}).on(usagePage).unregistered(),
	required("the library can be unregistered after its sessions are released", func(c *testCase) {
		c.registersAndEnds()
	}).on(usagePage).unregistered(),
	recommended("the library can be registered again after that", func(c *testCase) {
		c.registersAndEnds()
		c.registersAndEnds()
	}).on(usagePage).unregistered(),
	required("CreateEp: sessions live side by side, and end in any order", func(c *testCase) {
		first, second := c.source, c.family.model(2, 1, false)
		a, b := c.open(c.write("a.onnx", first), nil), c.open(c.write("b.onnx", second), nil)
		c.computes(a, first)
		a.Release()
		c.computes(b, second)
		b.Release()
	}),
	optional("virtual devices: registered under a name that ends in .virtual it lists devices "+
		"that are not there", func(c *testCase) {
		c.register(c.ep.Name + ".virtual")
		all, err := c.env.Devices()
		must(err)
		for _, d := range all {
			if d.DeviceMetadata[workerproto.IsVirtual] == "1" ||
				d.EPMetadata[workerproto.IsVirtual] == "1" {
				return
			}
		}
		c.skip("it lists none")
	}).unregistered(),
}

func (c *testCase) registersAndEnds() {
	c.register(c.ep.Name)
	c.devices = c.lists(c.ep.Name)
	c.loads(c.write("m.onnx", c.source), nil, c.source)
	c.succeeds("UnregisterExecutionProviderLibrary("+c.ep.Name+")", func() error {
		return c.env.Unregister(c.ep.Name)
	})
}

func (c *testCase) register(name string) {
	c.succeeds("RegisterExecutionProviderLibrary("+name+"), GetEpDevices", func() error {
		return c.env.Register(name, c.ep.Library)
	})
}

func (c *testCase) lists(name string) (devices []ort.Device) {
	c.does("GetEpDevices", "devices under the name "+name, func() (string, error) {
		all, err := c.env.Devices()
		if err != nil {
			return "", err
		}
		var others []string
		for _, d := range all {
			if d.EP == name {
				devices = append(devices, d)
			} else {
				others = append(others, d.EP)
			}
		}
		if len(devices) == 0 {
			return "", fmt.Errorf("none; there are those of %s", strings.Join(others, ", "))
		}
		return fmt.Sprint(len(devices)), nil
	})
	return devices
}
