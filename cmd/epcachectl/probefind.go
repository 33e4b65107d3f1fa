package main

import (
	"context"
	"errors"
	"strings"

	"github.com/pelletier/go-toml/v2"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// tomlString spells a path as people write it, and leaves the odd ones to those who know all rules.
func tomlString(path string) (string, error) {
	if term.Printable(path) == path && !strings.ContainsAny(path, `"\`) {
		return `"` + path + `"`, nil
	}
	text, err := toml.Marshal(map[string]string{"directory": path})
	return strings.TrimSpace(strings.TrimPrefix(string(text), "directory = ")), err
}

func (a *app) findRuntimes(ctx context.Context, dir string) error {
	runtimes, err := lookFor(ctx, dir)
	if err != nil {
		return err
	}
	if a.JSON {
		out := make([]*wire.RuntimeFacts, len(runtimes))
		for i, r := range runtimes {
			out[i] = &wire.RuntimeFacts{Directory: r.Directory, OrtVersion: r.ORTVersion,
				OrtLibrary: r.ORTLibrary}
			for _, ep := range r.EPs {
				out[i].Eps = append(out[i].Eps, &wire.EpFacts{Name: ep.EP, Library: ep.Path})
			}
		}
		if err := a.Print.JSON(jsonout.List(out)); err != nil || len(runtimes) > 0 {
			return err
		}
	}
	if len(runtimes) == 0 {
		a.Print.Failure(exit.Hint(errors.New("probe: no runtime with a known execution provider found"),
			"install one: pip install --no-deps --target runtime onnxruntime onnxruntime-ep-openvino, and look again with --runtime runtime"))
		return exit.Status(exit.NotFound)
	}
	for _, r := range runtimes {
		a.Print.Line("# ONNX Runtime %s", term.OrDash(r.ORTVersion))
		for _, ep := range r.EPs {
			a.Print.Line("# %s: %s", term.Printable(ep.EP), term.Printable(ep.Path))
		}
		text, err := tomlString(r.Directory)
		if err != nil {
			return err
		}
		a.Print.Line("[[runtime]]\ndirectory = %s\n", text)
	}
	return nil
}

func lookFor(ctx context.Context, dir string) ([]compilers.Runtime, error) {
	if dir == "" {
		return compilers.FindAll(ctx), nil
	}
	r, err := compilers.Find(dir)
	if errors.Is(err, compilers.ErrNotFound) {
		err = &unixsock.Error{Class: wire.ErrorClass_NOT_FOUND, Text: err.Error()}
	}
	return []compilers.Runtime{r}, err
}
