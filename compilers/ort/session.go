//go:build linux && (amd64 || arm64)

package ort

import (
	"fmt"
	"maps"
	"slices"
)

// SessionOptions is an OrtSessionOptions.
type SessionOptions struct {
	env *Env
	ptr handle
}

// NewSessionOptions gives ORT's defaults.
func (e *Env) NewSessionOptions() (*SessionOptions, error) {
	o := &SessionOptions{env: e}
	if err := e.api.do(fnCreateSessionOptions, &o.ptr); err != nil {
		return nil, err
	}
	return o, nil
}

// Append adds an EP with some of its devices; EPs are asked in the order in which they are added.
func (o *SessionOptions) Append(devices []Device, options map[string]string) error {
	keys := slices.Sorted(maps.Keys(options))
	var values []string
	for _, k := range keys {
		values = append(values, options[k])
	}
	return o.env.api.do(fnAppendExecutionProviderV2, o.ptr, o.env.ptr, pointers(devices), len(devices), keys, values, len(keys))
}

// Set adds a session config entry.
func (o *SessionOptions) Set(key, value string) error {
	return o.env.api.do(fnAddSessionConfigEntry, o.ptr, key, value)
}

// FixDimension gives a free dimension a value, by name.
func (o *SessionOptions) FixDimension(name string, value int64) error {
	return o.env.api.do(fnAddFreeDimensionOverrideByName, o.ptr, name, value)
}

// FixDenotation gives free dimensions a value, by denotation.
func (o *SessionOptions) FixDenotation(denotation string, value int64) error {
	return o.env.api.do(fnAddFreeDimensionOverride, o.ptr, denotation, value)
}

// SetGraphOptimization sets the graph optimisation level, by name; see Level.
func (o *SessionOptions) SetGraphOptimization(name string) error {
	level, err := Level(name)
	if err != nil {
		return err
	}
	return o.env.api.do(fnSetSessionGraphOptLevel, o.ptr, level)
}

// Release ends the options; sessions made with them go on.
func (o *SessionOptions) Release() { o.env.api.raw(fnReleaseSessionOptions, o.ptr) }

// Level gives GraphOptimizationLevel's number for a name: disable_all, basic, extended, layout, all.
func Level(name string) (int32, error) {
	levels := map[string]int32{"disable_all": 0, "basic": 1, "extended": 2, "layout": 3, "all": 99}
	level, ok := levels[name]
	if !ok {
		return 0, fmt.Errorf("graph optimisation level %q: there are disable_all, basic, extended, layout, all", name)
	}
	return level, nil
}

// Session is an OrtSession.
type Session struct {
	env *Env
	ptr handle
}

// Open creates a session from a model file.
func (o *SessionOptions) Open(path string) (*Session, error) {
	return o.session(fnCreateSession, o.env.ptr, path)
}

func (o *SessionOptions) session(create function, args ...any) (*Session, error) {
	s := &Session{env: o.env}
	if err := o.env.api.do(create, append(args, o.ptr, &s.ptr)...); err != nil {
		return nil, err
	}
	return s, nil
}

// OpenBytes creates a session from a model in memory, which ORT copies. What stands beside a model file is not found from there: the session options
// session.model_external_initializers_file_folder_path and ep.context_file_path say where it is.
func (o *SessionOptions) OpenBytes(model []byte) (*Session, error) {
	return o.session(fnCreateSessionFromArray, o.env.ptr, model, len(model))
}

// Release ends the session.
func (s *Session) Release() { s.env.api.raw(fnReleaseSession, s.ptr) }
