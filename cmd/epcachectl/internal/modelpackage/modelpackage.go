// Package modelpackage writes builds of a model in ONNX Runtime's own layout, a model package.
// Applications open it without epcached, by OrtModelPackageApi of ONNX Runtime 1.31.
package modelpackage

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/portable"
)

// manifest has only keys of the format, because ONNX Runtime refuses a package with unknown keys.
type manifest struct {
	SchemaVersion string               `json:"schema_version"`
	Components    map[string]component `json:"components"`
}

type component struct {
	Variants variants `json:"variants"`
}

// variants are ordered, because ONNX Runtime uses the first of equally good ones.
type variants []variant

type variant struct {
	name string

	Directory     string `json:"variant_directory"`
	EP            string `json:"ep"`
	Device        string `json:"device,omitempty"` // "cpu", "gpu", "npu"; "": any
	Compatibility string `json:"compatibility_string,omitempty"`
	Executors     struct {
		ORT struct {
			ModelFile string `json:"model_file"`
		} `json:"ort"`
	} `json:"executor_info"`
}

// MarshalJSON implements json.Marshaler: an object in the order of the slice.
func (vs variants) MarshalJSON() ([]byte, error) {
	var out bytes.Buffer
	for i, v := range vs {
		raw, err := json.Marshal(v)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&out, "%c%q:%s", "{,"[min(i, 1)], v.name, raw)
	}
	out.WriteByte('}')
	return out.Bytes(), nil
}

// componentName is the name of a package's only component.
const componentName = "model"

// Build is a build that may be in a package.
type Build struct {
	*portable.Card
	Made time.Time
}

// Name returns the name of the build's variant.
func (b Build) Name() string { return b.Config.BuildKey.String()[:12] }

func (b Build) variant() variant {
	ep := b.Config.EPs[0]
	v := variant{name: b.Name(), EP: ep.Name, Compatibility: ep.CompatibilityString}
	v.Directory, v.Executors.ORT.ModelFile = path.Join(componentName, v.name), b.Config.Graph
	for i, d := range ep.Devices {
		kind, _, _ := strings.Cut(strings.ToLower(d), " ")
		if i > 0 && kind != v.Device || !slices.Contains([]string{"cpu", "gpu", "npu"}, kind) {
			v.Device = ""
			break
		}
		v.Device = kind
	}
	return v
}

// Select returns the builds for a package in order, and warnings. Of builds that ONNX Runtime
// cannot distinguish it keeps only the newest. Builds without a compatibility string are last,
// because ONNX Runtime uses them without a verdict.
func Select(builds []Build) (kept []Build, warnings []string) {
	states := func(b Build) int { return min(len(b.variant().Compatibility), 1) }
	builds = slices.Clone(builds)
	slices.SortStableFunc(builds, func(a, b Build) int {
		return cmp.Or(states(b)-states(a), b.Made.Compare(a.Made), cmp.Compare(a.Name(), b.Name()))
	})
	for _, b := range builds {
		v, ep := b.variant(), &b.Config.EPs[0]
		alike := slices.IndexFunc(kept, func(other Build) bool {
			o := other.variant()
			return o.EP == v.EP && o.Device == v.Device && o.Compatibility == v.Compatibility
		})
		switch {
		case len(b.Config.Members) > 0:
			warnings = append(warnings, v.name+" is left out: it is a group of several models")
			continue
		case alike >= 0:
			warnings = append(warnings,
				fmt.Sprintf("%s is left out: for ONNX Runtime it is like %s",
					v.name, kept[alike].Name()))
			continue
		case v.Compatibility == "":
			warnings = append(warnings,
				fmt.Sprintf("%s %s states no compatibility: where no other "+
					"variant suits, ONNX Runtime takes %s, which may not load", v.EP, ep.Version,
					v.name))
		}
		kept = append(kept, b)
	}
	return kept, warnings
}

// Write makes a package of builds of the bundle in a directory, whose files it verifies. It is made
// under a temporary name and renamed, so that it is complete or missing.
func Write(ctx context.Context, bundle, to string, builds []Build) error {
	if some, err := os.ReadDir(to); err == nil && len(some) > 0 {
		return fmt.Errorf("%s: not empty", to)
	}
	if len(builds) == 0 {
		return errors.New("no build that a model package can have")
	}
	from, err := portable.Open(ctx, bundle)
	if err != nil {
		return err
	}
	defer from.Close()
	var all variants
	made := filepath.Join(bundle, "package")
	for _, b := range builds {
		v := b.variant()
		all = append(all, v)
		for i, f := range b.Config.Files {
			at := filepath.Join(made, filepath.FromSlash(path.Join(v.Directory, f.Name)))
			if err := extract(ctx, from, b.Card, i, at); err != nil {
				return err
			}
		}
	}
	text, err := json.MarshalIndent(manifest{"1.0", map[string]component{componentName: {all}}},
		"", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(made, "manifest.json"), append(text, '\n'),
		0o666); err != nil {
		return err
	}
	return os.Rename(made, to)
}

func extract(ctx context.Context, from *portable.Bundle, c *portable.Card, i int, to string) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o777); err != nil {
		return err
	}
	file, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	return errors.Join(from.Extract(ctx, c, i, file, nil), file.Sync(), file.Close())
}
