//go:build linux && (amd64 || arm64)

package ort

import (
	"errors"
	"runtime"
	"slices"

	"github.com/ebitengine/purego"
)

// Flags of the compile API: OrtCompileApiFlags.
const (
	ErrorIfNoNodesCompiled  = uint32(1) << 0
	ErrorIfOutputFileExists = uint32(1) << 1
)

// Compilation is one use of the compile API. Model or ModelPath is the source. OutputPath, Write or
// Buffer selects the destination; without any of them ORT writes the compiled model beside the
// source, as NAME_ctx.onnx.
type Compilation struct {
	ModelPath string
	Model     []byte

	OutputPath string
	// Write is called with the pieces of the compiled model. It must not keep the slice after the
	// call.
	Write  func([]byte) error
	Buffer bool // Compile returns the compiled model

	Embed bool
	// Level is a graph optimisation level by name, or "" for the compile API's default, which
	// differs from that of session options.
	Level string
	Flags uint32

	// BinaryDir and BinaryModel tell the EP the directory and the name prefix of context binaries,
	// if the compiled model has no path.
	BinaryDir, BinaryModel string

	// InitializersFile is the file, relative to the compiled model, for initializers that are not
	// in contexts; "": they stay in the model.
	InitializersFile      string
	InitializersThreshold int64 // in bytes; smaller initializers stay in the model
	// Location, if not nil, is called for each of these initializers, instead of using
	// InitializersFile.
	Location func(Initializer) (*Place, error)
}

// Initializer is a constant of a compiled model. Data is ORT's memory, valid only during the call.
type Initializer struct {
	Name  string
	Data  []byte
	Place *Place // its location in external data of the source model, if any
}

// Place is the location of an initializer's data: a file relative to its model's directory, and a
// range of bytes.
type Place struct {
	File         string
	Offset, Size int64
}

// Compile compiles a model by the compile API. The result is nil unless c.Buffer is set.
func (o *SessionOptions) Compile(c Compilation) ([]byte, error) {
	k := &compiling{callSequence: callSequence{API: o.env.api}, Compilation: c}
	if !k.do(fnCreateCompilationOptions, o.env.ptr, o.ptr, &k.options) {
		return nil, k.err
	}
	defer k.raw(fnReleaseCompilationOptions, k.options)
	defer k.pins.Unpin()
	k.setFiles()
	k.setContext()
	k.do(fnCompileModel, o.env.ptr, k.options)
	if err := errors.Join(k.err, k.failed); err != nil || !c.Buffer {
		return nil, err
	}
	model := slices.Clone(elementsAt[byte](k.buffer, k.size))
	k.do(fnAllocatorFree, k.allocator, k.buffer)
	return model, k.err
}

type compiling struct {
	Compilation
	callSequence
	options handle
	pins    runtime.Pinner // pins memory that ORT has pointers to until the model is compiled

	allocator handle
	buffer    handle
	size      uintptr
	failed    error // error of a callback
}

func (k *compiling) setFiles() {
	if k.Model == nil {
		k.do(fnSetInputModelPath, k.options, k.ModelPath)
	} else {
		if len(k.Model) > 0 {
			k.pins.Pin(&k.Model[0])
		}
		k.do(fnSetInputModelFromBuffer, k.options, k.Model, len(k.Model))
	}
	switch {
	case k.OutputPath != "":
		k.do(fnSetOutputModelPath, k.options, k.OutputPath)
	case k.Write != nil:
		k.do(fnSetOutputWriteFunc, k.options, handle(purego.NewCallback(k.write)), nil)
	case k.Buffer:
		k.do(fnGetAllocatorWithDefaultOptions, &k.allocator) // owned by ORT, not released
		k.pins.Pin(k)
		k.do(fnSetOutputModelBuffer, k.options, k.allocator, &k.buffer, &k.size)
	}
}

func (k *compiling) setContext() {
	k.do(fnSetEpContextEmbedMode, k.options, k.Embed)
	if k.BinaryDir != "" {
		k.do(fnSetBinaryInformation, k.options, k.BinaryDir, k.BinaryModel)
	}
	if k.Flags != 0 {
		k.do(fnSetCompileFlags, k.options, k.Flags)
	}
	if k.Level != "" && k.err == nil {
		var level int32
		level, k.err = Level(k.Level)
		k.do(fnSetCompileGraphOptLevel, k.options, level)
	}
	switch {
	case k.Location != nil:
		k.do(fnSetInitializerLocation, k.options, handle(purego.NewCallback(k.locate)), nil)
	case k.InitializersFile != "":
		k.do(fnSetOutputInitializersFile, k.options, k.InitializersFile, k.InitializersThreshold)
	}
}

// write is an OrtWriteBufferFunc. Callbacks are never freed, and a process can have only 2000, so
// use this in processes that compile few models.
func (k *compiling) write(_, data handle, size uintptr) handle {
	return k.status(k.Write(elementsAt[byte](data, size)))
}

func (k *compiling) locate(_, name, value, source, out handle) handle {
	*(*handle)(pointer(out)) = 0
	i := Initializer{Name: text(name)}
	c := callSequence{API: k.API}
	if i.Data = c.bytesOf(value); c.err != nil {
		return k.status(c.err)
	}
	if source != 0 {
		i.Place = &Place{File: text(handle(c.raw(fnExternalInfoFilePath, source))),
			Offset: int64(c.raw(fnExternalInfoFileOffset, source)),
			Size:   int64(c.raw(fnExternalInfoByteSize, source))}
	}
	place, err := k.Location(i)
	if err != nil || place == nil {
		return k.status(err)
	}
	var info handle // owned by ORT from here on
	if c.do(fnCreateExternalInfo, place.File, place.Offset, int(place.Size), &info) {
		*(*handle)(pointer(out)) = info
	}
	return k.status(c.err)
}

// status makes an OrtStatus of a callback's error. It also keeps the error, because ORT may replace
// the text.
func (k *compiling) status(err error) handle {
	if err == nil {
		return 0
	}
	if k.failed == nil {
		k.failed = err
	}
	const fail = int32(1)
	return handle(k.raw(fnCreateStatus, fail, err.Error()))
}

// AddExternalFile sets the content of an external data file by its name in the model, so that ORT
// does not open the file. Call free only after the session is created, because ORT reads the
// content until then.
func (o *SessionOptions) AddExternalFile(name string, data []byte) (free func(), err error) {
	pins := &runtime.Pinner{}
	return pins.Unpin, o.env.api.do(fnAddExternalFilesInMemory, o.ptr, []string{name},
		[]handle{handle(pinned(pins, data))}, []int64{int64(len(data))}, 1)
}
