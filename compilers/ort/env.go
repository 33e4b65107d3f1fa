//go:build linux && (amd64 || arm64)

package ort

import (
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/ebitengine/purego"

	"github.com/epcached/epcached/compilers/workerproto"
)

// Env is an OrtEnv. ORT keeps one per process: a second one shares everything with the first.
type Env struct {
	api *API
	ptr handle
}

// Device is an OrtEpDevice: a hardware device as one EP sees it.
type Device struct {
	EP       string // the name that the EP was registered under, or one of its own
	EPVendor string
	workerproto.DeviceFacts

	ptr handle
}

var severities = []string{"verbose", "info", "warning", "error", "fatal"}

const warningLevel, errorLevel = 2, 3

// NewEnv creates the environment. It writes messages of warnings and errors to log, one line each,
// and calls failed, if not nil, with the text of errors. ORT calls both from several threads at
// once.
func (a *API) NewEnv(log io.Writer, failed func(text string)) (*Env, error) {
	callback := purego.NewCallback(func(_ uintptr, severity int32, category, _, where,
		message handle) uintptr {
		name := "?"
		if severity >= 0 && int(severity) < len(severities) {
			name = severities[severity]
		}
		fmt.Fprintf(log, "[%s:%s %s] %s\n", name, text(category), text(where), text(message))
		if severity >= errorLevel && failed != nil {
			failed(text(message))
		}
		return 0
	})
	e := &Env{api: a}
	if err := a.do(fnCreateEnvWithCustomLogger, callback, nil, int32(warningLevel), "epcached",
		&e.ptr); err != nil {
		return nil, err
	}
	if err := a.do(fnDisableTelemetryEvents, e.ptr); err != nil {
		e.Release()
		return nil, err
	}
	return e, nil
}

// Register loads an EP library under a name. QNN takes its EP name from it, so it must be the
// canonical one.
func (e *Env) Register(name, path string) error {
	return e.api.do(fnRegisterExecutionProviderLib, e.ptr, name, path)
}

// Unregister unloads the library that was registered under a name. Every session that uses it has
// to be released before.
func (e *Env) Unregister(name string) error {
	return e.api.do(fnUnregisterExecutionProvider, e.ptr, name)
}

// Devices lists every device of every EP: of those that were registered, and of the CPU EP.
func (e *Env) Devices() ([]Device, error) {
	var list handle
	var count uintptr
	if err := e.api.do(fnGetEpDevices, e.ptr, &list, &count); err != nil {
		return nil, err
	}
	var devices []Device
	for _, ptr := range elementsAt[handle](list, count) {
		devices = append(devices, e.api.device(ptr))
	}
	return devices, nil
}

// DevicesOf lists devices under exactly this EP name, and not under names such as \X.AUTO".
func (e *Env) DevicesOf(ep string) ([]Device, error) {
	all, err := e.Devices()
	return slices.DeleteFunc(all, func(d Device) bool { return d.EP != ep }), err
}

func (a *API) device(ptr handle) Device {
	hardware := handle(a.raw(fnEpDeviceDevice, ptr))
	types := []string{"CPU", "GPU", "NPU"}
	kind := "?"
	if n := int32(a.raw(fnHardwareDeviceType, hardware)); n >= 0 && int(n) < len(types) {
		kind = types[n]
	}
	return Device{
		EP:       text(handle(a.raw(fnEpDeviceEpName, ptr))),
		EPVendor: text(handle(a.raw(fnEpDeviceEpVendor, ptr))),
		DeviceFacts: workerproto.DeviceFacts{
			Type:           kind,
			VendorID:       uint32(a.raw(fnHardwareDeviceVendorID, hardware)),
			Vendor:         text(handle(a.raw(fnHardwareDeviceVendor, hardware))),
			DeviceID:       uint32(a.raw(fnHardwareDeviceDeviceID, hardware)),
			EPMetadata:     a.pairs(handle(a.raw(fnEpDeviceEpMetadata, ptr))),
			DeviceMetadata: a.pairs(handle(a.raw(fnHardwareDeviceMetadata, hardware))),
		},
		ptr: ptr,
	}
}

// Compatibility asks the devices' EP for its verdict on a compatibility string:
// OrtCompiledModelCompatibility.
func (e *Env) Compatibility(devices []Device, info string) (int, error) {
	var verdict int32
	err := e.api.do(fnGetModelCompatibilityForDevices, pointers(devices), len(devices),
		info, &verdict)
	return int(verdict), err
}

// Release ends the environment. Do not call it at exit, because EP libraries may still have threads
// that use it.
func (e *Env) Release() { e.api.raw(fnReleaseEnv, e.ptr) }

func pointers(devices []Device) []handle {
	var list []handle
	for _, d := range devices {
		list = append(list, d.ptr)
	}
	return list
}

// SessionOptions is an OrtSessionOptions.
type SessionOptions struct {
	env *Env
	ptr handle
}

// NewSessionOptions returns ORT's defaults.
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
	return o.env.api.do(fnAppendExecutionProviderV2, o.ptr, o.env.ptr, pointers(devices),
		len(devices), keys, values, len(keys))
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

// Release ends the options; sessions made with them stay valid.
func (o *SessionOptions) Release() { o.env.api.raw(fnReleaseSessionOptions, o.ptr) }

// Level returns GraphOptimizationLevel's number for a name: disable_all, basic, extended, layout,
// all.
func Level(name string) (int32, error) {
	levels := map[string]int32{"disable_all": 0, "basic": 1, "extended": 2, "layout": 3, "all": 99}
	level, ok := levels[name]
	if !ok {
		return 0, fmt.Errorf("graph optimization level %q: it must be disable_all, basic, "+
			"extended, layout or all", name)
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

// OpenBytes creates a session from a model in memory, which ORT copies. The session options
// session.model_external_initializers_file_dir_path and ep.context_file_path locate its files.
func (o *SessionOptions) OpenBytes(model []byte) (*Session, error) {
	return o.session(fnCreateSessionFromArray, o.env.ptr, model, len(model))
}

// Release ends the session.
func (s *Session) Release() { s.env.api.raw(fnReleaseSession, s.ptr) }
