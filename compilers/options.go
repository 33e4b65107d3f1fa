package compilers

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Normalize gives the canonical form of an EP's options: values that mean the same become equal, and options that say what is the case anyway
// are left out. Options that may not be given are an error that wraps ErrOption and names the option. Unknown options are such an error too,
// unless allowUnknown; then they are kept as they are, and named in unknown.
func (i EPInfo) Normalize(options map[string]string, allowUnknown bool) (normal map[string]string, unknown []string, err error) {
	normal = map[string]string{}
	for name, value := range options {
		opt, known := i.Options[name]
		if !known {
			if !allowUnknown {
				return nil, nil, fmt.Errorf("option %q of %s: %w: unknown to epcached", name, i.Name, ErrOption)
			}
			unknown = append(unknown, name)
			normal[name] = value
			continue
		}
		value, err := opt.normalize(value)
		if err != nil {
			return nil, nil, fmt.Errorf("option %q of %s: %w", name, i.Name, err)
		}
		if opt.Default != "" && value == opt.Default {
			continue
		}
		normal[name] = value
	}
	slices.Sort(unknown)
	return normal, unknown, nil
}

func (o EPOption) normalize(value string) (string, error) {
	switch o.Policy {
	case RefusedByUse:
		return "", fmt.Errorf("%w: it makes the EP write or load something", ErrOption)
	case LibraryName:
		if value == "" || value != filepath.Base(value) || value == "." || value == ".." {
			return "", fmt.Errorf("%w: %q is a path: give the name of a library that stands beside the EP library", ErrOption, value)
		}
	}
	return CanonicalValue(o.Kind, value)
}

// CanonicalValue gives equal texts for values that the EP reads as equal.
func CanonicalValue(kind, value string) (string, error) {
	switch kind {
	case "bool":
		switch strings.ToLower(value) {
		case "1", "true", "on", "yes":
			return "1", nil
		case "0", "false", "off", "no":
			return "0", nil
		}
		return "", fmt.Errorf("%w: %q is neither true nor false", ErrOption, value)
	case "int":
		n, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
		if err != nil {
			return "", fmt.Errorf("%w: %q is not a whole number", ErrOption, value)
		}
		return strconv.FormatInt(n, 10), nil
	case "json":
		return canonicalJSON(value)
	}
	return value, nil
}

// canonicalJSON sorts keys and drops white space; numbers keep their spelling, for 1.0 and 1 may be two things to an EP.
func canonicalJSON(value string) (string, error) {
	dec := json.NewDecoder(strings.NewReader(value))
	dec.UseNumber()
	var tree any
	if err := dec.Decode(&tree); err != nil {
		return "", fmt.Errorf("%w: not JSON: %w", ErrOption, err)
	}
	if dec.More() {
		return "", fmt.Errorf("%w: more than one JSON value", ErrOption)
	}
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(tree); err != nil {
		return "", fmt.Errorf("%w: %w", ErrOption, err)
	}
	return strings.TrimSuffix(out.String(), "\n"), nil
}

// Resolve gives the options as the EP wants them: fills in what must be passed, and turns names of libraries into absolute paths beside the EP
// library at lib. It is used just before a compile, and for the options that an application gets with its lease.
func (i EPInfo) Resolve(lib string, options map[string]string) map[string]string {
	full := map[string]string{}
	maps.Copy(full, options)
	for name, opt := range i.Options {
		_, given := full[name]
		_, excluded := options[opt.Unless]
		if opt.Fill != "" && !given && !excluded {
			full[name] = opt.Fill
		}
		if value, ok := full[name]; ok && opt.Policy == LibraryName && !filepath.IsAbs(value) {
			full[name] = filepath.Join(filepath.Dir(lib), filepath.Base(value))
		}
	}
	return full
}

// HardwareOf takes the hardware architecture out of a compatibility string; empty where the string does not tell.
func (i EPInfo) HardwareOf(compatibility string) string {
	if i.Hardware == nil {
		return ""
	}
	m := i.Hardware.FindStringSubmatch(compatibility)
	if len(m) < 2 {
		return ""
	}
	return strings.Join(m[1:], "/")
}

// ForFingerprint keeps those options that the fingerprint depends on. Of an EP without an entry it may depend on any.
func (i EPInfo) ForFingerprint(options map[string]string) map[string]string {
	if i.Name == "" {
		return options
	}
	kept := map[string]string{}
	for _, name := range i.FingerprintOptions {
		if value, ok := options[name]; ok {
			kept[name] = value
		}
	}
	return kept
}
