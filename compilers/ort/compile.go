//go:build linux && (amd64 || arm64)

package ort

import (
	"errors"
	"maps"
	"runtime"
	"slices"
	"unsafe"

	"github.com/ebitengine/purego"
)

// Flags of the compile API: OrtCompileApiFlags.
const (
	ErrorIfNoNodesCompiled  = uint32(1) << 0
	ErrorIfOutputFileExists = uint32(1) << 1
)

// Compilation is one use of the compile API. Model or ModelPath says what is compiled. OutputPath, Write or Buffer says where the compiled model goes;
// without any of them ORT writes it beside the model, as NAME_ctx.onnx.
type Compilation struct {
	ModelPath string
	Model     []byte

	OutputPath string
	Write      func([]byte) error // gets the compiled model piece by piece; what it is given is gone after the call
	Buffer     bool               // Compile returns the compiled model

	Embed bool
	Level string // a graph optimisation level by name, or "" for the compile API's own default, which is not that of the session options
	Flags uint32

	// BinaryFolder and BinaryModel tell the EP where context binaries go, and the model's name that theirs begins with, where no path of the
	// compiled model does.
	BinaryFolder, BinaryModel string

	InitializersFile      string // for initializers that stay outside of contexts, relative to the compiled model; empty: they stay in the model
	InitializersThreshold int64  // bytes; smaller ones stay in the model
	// Location, where it is not nil, is asked for each of those initializers in place of InitializersFile.
	Location func(Initializer) (*Place, error)
}

// Initializer is a constant of a compiled model. Data is ORT's memory, and only there during the call.
type Initializer struct {
	Name  string
	Data  []byte
	Place *Place // where the source model has it, if that is a file beside it
}

// Place is where the data of an initializer stands: a file relative to its model's folder, and a range of bytes.
type Place struct {
	File         string
	Offset, Size int64
}

// Compile compiles a model by the compile API. The result is nil unless c.Buffer is set.
func (o *SessionOptions) Compile(c Compilation) ([]byte, error) {
	api := o.env.api
	k := &compiling{api: api, Compilation: c}
	if err := api.do(fnCreateCompilationOptions, o.env.ptr, o.ptr, &k.options); err != nil {
		return nil, err
	}
	defer api.raw(fnReleaseCompilationOptions, k.options)
	defer k.pins.Unpin()
	for _, set := range []func() error{k.setInput, k.setOutput, k.setContext, k.setInitializers} {
		if err := set(); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(api.do(fnCompileModel, o.env.ptr, k.options), k.failed); err != nil || !c.Buffer {
		return nil, err
	}
	return k.takeBuffer()
}

// compiling is a Compilation under way.
type compiling struct {
	Compilation
	api     *API
	options handle
	pins    runtime.Pinner // of what ORT keeps pointers to until the model is compiled

	allocator handle
	buffer    handle
	size      uintptr
	failed    error // of a callback: what it said itself
}

func (k *compiling) setInput() error {
	if k.Model == nil {
		return k.api.do(fnSetInputModelPath, k.options, k.ModelPath)
	}
	if len(k.Model) > 0 {
		k.pins.Pin(&k.Model[0])
	}
	return k.api.do(fnSetInputModelFromBuffer, k.options, k.Model, len(k.Model))
}

func (k *compiling) setOutput() error {
	switch {
	case k.OutputPath != "":
		return k.api.do(fnSetOutputModelPath, k.options, k.OutputPath)
	case k.Write != nil:
		return k.api.do(fnSetOutputWriteFunc, k.options, handle(purego.NewCallback(k.write)), nil)
	case k.Buffer:
		if err := k.api.do(fnGetAllocatorWithDefaultOptions, &k.allocator); err != nil { // ORT's own: not to be released
			return err
		}
		k.pins.Pin(k)
		return k.api.do(fnSetOutputModelBuffer, k.options, k.allocator, &k.buffer, &k.size)
	}
	return nil
}

func (k *compiling) setContext() error {
	if err := k.api.do(fnSetEpContextEmbedMode, k.options, k.Embed); err != nil {
		return err
	}
	if k.BinaryFolder != "" {
		if err := k.api.do(fnSetBinaryInformation, k.options, k.BinaryFolder, k.BinaryModel); err != nil {
			return err
		}
	}
	if k.Flags != 0 {
		if err := k.api.do(fnSetCompileFlags, k.options, k.Flags); err != nil {
			return err
		}
	}
	if k.Level == "" {
		return nil
	}
	level, err := Level(k.Level)
	if err != nil {
		return err
	}
	return k.api.do(fnSetCompileGraphOptLevel, k.options, level)
}

func (k *compiling) setInitializers() error {
	switch {
	case k.Location != nil:
		return k.api.do(fnSetInitializerLocation, k.options, handle(purego.NewCallback(k.locate)), nil)
	case k.InitializersFile != "":
		return k.api.do(fnSetOutputInitializersFile, k.options, k.InitializersFile, k.InitializersThreshold)
	}
	return nil
}

// write is an OrtWriteBufferFunc. Callbacks are never freed, and a process has 2000 of them at most: this is for processes that compile a few models.
func (k *compiling) write(_, data handle, size uintptr) handle {
	return k.status(k.Write(bytesAt(data, size)))
}

// locate is an OrtGetInitializerLocationFunc.
func (k *compiling) locate(_, name, value, source, out handle) handle {
	*(*handle)(pointer(out)) = 0
	i := Initializer{Name: text(name)}
	var size uintptr
	var data handle
	err := k.api.do(fnGetTensorSizeInBytes, value, &size)
	if err == nil && size > 0 {
		err = k.api.do(fnGetTensorMutableData, value, &data) // only read
	}
	if err != nil {
		return k.status(err)
	}
	i.Data = bytesAt(data, size)
	if source != 0 {
		i.Place = &Place{File: text(handle(k.api.raw(fnExternalInfoFilePath, source))), Offset: int64(k.api.raw(fnExternalInfoFileOffset, source)),
			Size: int64(k.api.raw(fnExternalInfoByteSize, source))}
	}
	place, err := k.Location(i)
	if err != nil || place == nil {
		return k.status(err)
	}
	var info handle // ORT's from here on
	if err := k.api.do(fnCreateExternalInfo, place.File, place.Offset, int(place.Size), &info); err != nil {
		return k.status(err)
	}
	*(*handle)(pointer(out)) = info
	return 0
}

// status makes an OrtStatus of a callback's error, which is kept besides, for ORT may put it into words of its own.
func (k *compiling) status(err error) handle {
	if err == nil {
		return 0
	}
	if k.failed == nil {
		k.failed = err
	}
	const fail = int32(1)
	return handle(k.api.raw(fnCreateStatus, fail, err.Error()))
}

func (k *compiling) takeBuffer() ([]byte, error) {
	model := append([]byte{}, bytesAt(k.buffer, k.size)...)
	return model, k.api.do(fnAllocatorFree, k.allocator, k.buffer)
}

// bytesAt makes C memory readable, for as long as it is there.
func bytesAt(h handle, size uintptr) []byte {
	if h == 0 || size == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(pointer(h)), size)
}

// AddExternalFiles gives the session the contents of external data files, by the names under which the model knows them, so that it opens none of
// them. ORT reads them while a session is created, which must be before free is called.
func (o *SessionOptions) AddExternalFiles(files map[string][]byte) (free func(), err error) {
	pins := &runtime.Pinner{}
	var names []string
	var contents []handle
	var sizes []int64
	for _, name := range slices.Sorted(maps.Keys(files)) {
		data := files[name]
		if len(data) == 0 {
			continue // nothing can stand in it
		}
		names, contents, sizes = append(names, name), append(contents, handle(pinned(pins, data))), append(sizes, int64(len(data)))
	}
	if err := o.env.api.do(fnAddExternalFilesInMemory, o.ptr, names, contents, sizes, len(names)); err != nil {
		pins.Unpin()
		return nil, err
	}
	return pins.Unpin, nil
}
