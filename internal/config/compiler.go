package config

import (
	"cmp"
	"strconv"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/tomlfile"
)

// Check completes a [[compiler]], and finds what is wrong with its program.
func (c *Compiler) Check(v tomlfile.Value) {
	c.Device = cmp.Or(c.Device, "NPU")
	switch {
	case !v.Has("ep"):
	case len(c.Command) == 0 || c.Command[0] == "":
		v.In("command").Wrong("it names no program")
	case c.EP != "":
		c.Command[0] = v.Absolute(c.Command[0])
		if err := c.Tool().Check(); err != nil {
			v.In("command").Wrong("%v", err)
		}
	}
}

// Tool gives the compiler in the terms of package compilers.
func (c *Compiler) Tool() compilers.Tool {
	return compilers.Tool{EP: c.EP, Program: c.Command[0], Args: c.Command[1:], Version: c.Version, Files: c.Files, Read: c.Read,
		Device: c.Device, Alone: c.Alone}
}

// Check notes execution providers that have two compilers: neither would be the right one.
func (s *Settings) Check(v tomlfile.Value) {
	seen := map[string]bool{}
	for i, c := range s.Compilers {
		if seen[c.EP] {
			v.In("compiler", strconv.Itoa(i)).Wrong("%s has a compiler already", c.EP)
		}
		seen[c.EP] = true
	}
}
