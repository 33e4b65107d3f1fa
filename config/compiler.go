package config

import (
	"fmt"
	"strconv"

	"github.com/epcached/epcached/compilers"
)

func (c *Compiler) read(t *table) {
	t.text("ep", &c.EP, checkEP)
	t.texts("command", &c.Command, nil)
	t.texts("version", &c.Version, nil)
	t.files("files", &c.Files)
	t.files("read", &c.Read)
	c.Device = "NPU"
	t.choice("device", &c.Device, "CPU", "GPU", "NPU")
	t.truth("without_library", &c.Alone)
	_, named := t.values["ep"]
	switch {
	case !named:
		t.wrong("it names no execution provider: give ep")
	case len(c.Command) == 0 || c.Command[0] == "":
		t.wrong("it names no program", "command")
	case c.EP != "":
		c.Command[0] = t.document.Absolute(c.Command[0])
		if err := c.Tool().Check(); err != nil {
			t.wrong(err.Error(), "command")
		}
	}
	t.done()
}

// Tool gives the compiler in the terms of package compilers.
func (c *Compiler) Tool() compilers.Tool {
	return compilers.Tool{EP: c.EP, Program: c.Command[0], Args: c.Command[1:], Version: c.Version, Files: c.Files, Read: c.Read,
		Device: c.Device, Alone: c.Alone}
}

// oneEach notes execution providers that have two compilers: neither would be the right one.
func (s *Settings) oneEach(t *table) {
	seen := map[string]bool{}
	for i, c := range s.Compilers {
		if seen[c.EP] {
			t.wrong(fmt.Sprintf("%s has a compiler already", c.EP), "compiler", strconv.Itoa(i))
		}
		seen[c.EP] = true
	}
}
