//go:build linux && (amd64 || arm64)

package conformance

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/epcached/epcached/compilers/dialogue"
	"github.com/epcached/epcached/compilers/ort"
)

// semantic is a version by https://semver.org.
var semantic = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?$`)

// pluginLibrary has the guidelines for the library and its factory.
var pluginLibrary = []guideline{
	{
		name: "CreateEpFactories and GetSupportedDevices: the library registers, and lists " +
			"devices under the EP's name",
		bare: true,
		prove: func(c *testCase) {
			c.registers(c.ep.Name)
		},
	},
	{
		name:  "GetName ends in ExecutionProvider",
		level: dialogue.Recommended,
		prove: func(c *testCase) {
			c.check("name of the EP's devices", "...ExecutionProvider", c.ep.Name,
				strings.HasSuffix(c.ep.Name, "ExecutionProvider"))
		},
	},
	{
		name: "GetVendor is not empty",
		prove: func(c *testCase) {
			for _, d := range c.devices {
				c.check("vendor of the EP of device "+d.Type, "a name", d.EPVendor,
					d.EPVendor != "")
			}
		},
	},
	{
		name: "GetVersion is a semantic version",
		prove: func(c *testCase) {
			for _, d := range c.devices {
				version := d.EPMetadata["version"]
				c.check("metadata \"version\" of device "+d.Type, "MAJOR.MINOR.PATCH", version,
					semantic.MatchString(version))
			}
		},
	},
	{
		name:  "the registration name can be anything: the EP keeps its name",
		level: dialogue.Recommended,
		page:  usagePage,
		bare:  true,
		prove: func(c *testCase) {
			const other = "registered_by_epcached"
			c.does(registration(other), "success", func() (string, error) {
				return "success",
					c.env.Register(other, c.ep.Library)
			})
			c.lists(c.ep.Name)
		},
	},
	{
		name: "the library can be unregistered after its sessions are released",
		page: usagePage,
		bare: true,
		prove: func(c *testCase) {
			c.registersAndEnds()
		},
	},
	{
		name:  "the library can be registered again after that",
		page:  usagePage,
		level: dialogue.Recommended,
		bare:  true,
		prove: func(c *testCase) {
			c.registersAndEnds()
			c.registersAndEnds()
		},
	},
	{
		name: "CreateEp: sessions live side by side, and end in any order",
		prove: func(c *testCase) {
			first, second := c.family.model(1, 1, false), c.family.model(2, 1, false)
			a, b := c.open(c.write("a.onnx", first), nil), c.open(c.write("b.onnx", second), nil)
			c.computes(a, first)
			a.Release()
			c.computes(b, second)
			b.Release()
		},
	},
	{
		name: "virtual devices: registered under a name that ends in .virtual it lists devices " +
			"that are not there",
		level: dialogue.Optional,
		bare:  true,
		prove: func(c *testCase) {
			name := c.ep.Name + ".virtual"
			c.does(registration(name), "success", func() (string, error) {
				return "success",
					c.env.Register(name, c.ep.Library)
			})
			all, err := c.env.Devices()
			must(err)
			for _, d := range all {
				if d.DeviceMetadata[dialogue.IsVirtual] == "1" ||
					d.EPMetadata[dialogue.IsVirtual] == "1" {
					return
				}
			}
			c.skip("it lists none")
		},
	},
}

// registersAndEnds is the life of a library in an application.
func (c *testCase) registersAndEnds() {
	source := c.family.model(1, 1, false)
	c.registers(c.ep.Name)
	c.loads(c.write("m.onnx", source), nil, source)
	c.does("UnregisterExecutionProviderLibrary("+c.ep.Name+")", "success", func() (string,
		error) {
		return "success", c.env.Unregister(c.ep.Name)
	})
}

func registration(name string) string {
	return "RegisterExecutionProviderLibrary(" + name + "), GetEpDevices"
}

// registers registers the library and takes the devices.
func (c *testCase) registers(name string) {
	c.does(registration(name), "success", func() (string, error) {
		return "success",
			c.env.Register(name, c.ep.Library)
	})
	c.devices = c.lists(name)
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
