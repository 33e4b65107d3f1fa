// Package failure classifies failed compiles, words their messages, and is their negative cache.
//
// A Failure is made from the error and output of a worker (Of, OfLoad, OfOutput). Its Reason
// decides the advice to users, whether the model may be the cause, and when a request may retry.
// Only failures that the model may cause are remembered. Remembered is safe for concurrent use.
// Start reading at Of.
package failure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/modelname"
)

// Reason is the class of a compile's failure. The protocol has the same words.
type Reason string

const (
	// Crash: the compiler died from a signal of its own, or ended without a result.
	Crash       Reason = "crash"
	Timeout     Reason = "timeout"
	CPU         Reason = "processor time"
	Memory      Reason = "memory"
	OutputLimit Reason = "output limit"
	Refused     Reason = "refused" // ONNX Runtime or the execution provider returned an error
	NoNode      Reason = "no node taken"
	Invalid     Reason = "invalid output"
	LoadCheck   Reason = "load check failed"
	Cancelled   Reason = "cancelled"
	WorkerDied  Reason = "worker died" // killed from outside, twice
	NoWorker    Reason = "worker not started"
	Sandbox     Reason = "sandbox" // even the smallest model does not compile and load in a worker
)

// Failure describes a failed compile. Every user of the model may see it, so its text names no file
// or user.
type Failure struct {
	RequestKey  index.RequestKey
	BuildKey    index.BuildKey
	ModelName   string
	ModelDigest cas.Digest
	EP          string
	Scope       string
	UID         uint32 // the user of the first request

	Reason Reason
	Text   string // ends with the end of the compiler's output
	// Facts always has "reason", and where they apply "signal", "code", "exit", "stderr", "logged"
	// and "free_dimensions".
	Facts map[string]string
	Hint  string // advice beyond that of the reason

	Count       int // number of failures in a row
	First, Last time.Time
	Retry       time.Time // when a request may retry
}

// maxLastWords bounds a compiler's standard error, and a failure's text, because many are kept.
const maxLastWords = 4 << 10

// Of classifies the error of a compile. It returns nil if the error is no failure of the compile
// itself. log is the worker's output.
func Of(err error, log string) *Failure {
	f := &Failure{Text: err.Error(), Facts: make(map[string]string)}
	var refused *compilers.RefusedError
	var exit *compilers.ExitError
	var none *compilers.NoNodesError
	switch {
	case errors.As(err, &none):
		f.Reason = NoNode
		if len(none.Errors) > 0 {
			f.Facts["logged"] = lastPart(strings.Join(none.Errors, "\n"))
			f.Hint = "correct the error that ONNX Runtime logged; epcachectl doctor tests the " +
				"execution provider again"
		}
	case errors.Is(err, compilers.ErrStart):
		f.Reason = NoWorker
	case errors.As(err, &refused):
		f.Reason, f.Facts["code"] = cmp.Or(limitInOutput(refused.Text), Refused),
			fmt.Sprint(refused.Code)
		if refused.Doing == "compile" { // omitted, because the text says that already
			f.Text = strings.Replace(f.Text, refused.Error(), refused.Cause(), 1)
		}
		f.nameRuntime(refused.Text)
	case errors.As(err, &exit):
		f.setExit(exit)
		log = exit.Stderr
	default:
		if f.Reason = limitReason(err); f.Reason == "" {
			return nil
		}
		if line := compilers.LastLine(log); line != "" {
			f.Text += ": " + line
		}
	}
	f.Facts["reason"] = string(f.Reason)
	if log != "" {
		f.Facts["stderr"] = lastPart(log)
	}
	f.Text = lastPart(f.Text)
	return f
}

// runtimeLimits are texts of ONNX Runtime's errors for valid models that it cannot compile, because
// it writes its marks of constants in memory into the compiled graph (onnxruntime#25510).
var runtimeLimits = []string{"_ORT_MEM_ADDR_", "in-memory address marker"}

// nameRuntime makes the failure say so if text, ONNX Runtime's error, is a limit of its own.
func (f *Failure) nameRuntime(text string) {
	in := func(limit string) bool { return strings.Contains(text, limit) }
	if slices.ContainsFunc(runtimeLimits, in) {
		f.Text = "the model is valid, but this ONNX Runtime cannot compile constants inside " +
			"bodies of If, Loop and Scan nodes: " + f.Text
		f.AddHint("use the model as it is: load it without epcached, or compile it with another " +
			"ONNX Runtime")
	}
}

func (f *Failure) setExit(exit *compilers.ExitError) {
	f.Facts["exit"] = fmt.Sprint(exit.Code)
	if exit.Signal != "" {
		f.Facts["signal"] = exit.Name
	}
	if exit.IsExternalSignal() {
		f.Reason = WorkerDied
		return
	}
	// A process often aborts when an allocation fails at its limit, so look for messages about
	// limits.
	f.Reason = cmp.Or(limitInOutput(compilers.LastLine(exit.Stderr)), Crash)
}

// limitReason classifies errors that the worker did not report itself: limits, and invalid output.
func limitReason(err error) Reason {
	for _, one := range []struct {
		is     error
		reason Reason
	}{
		{compilers.ErrTimeout, Timeout}, {compilers.ErrCPU, CPU}, {compilers.ErrMemory, Memory},
		{compilers.ErrOutputLimit, OutputLimit}, {compilers.ErrOutput, Invalid},
		{compilers.ErrProtocol, Invalid}, {context.Canceled, Cancelled},
	} {
		if errors.Is(err, one.is) {
			return one.reason
		}
	}
	if errors.As(err, new(*epmodel.FormatError)) {
		return Invalid
	}
	return ""
}

// limitMessages are messages of C, C++, Python and the system when there is no memory or space.
var limitMessages = []struct {
	reason Reason
	words  []string
}{
	{Memory, []string{"std::bad_alloc", "bad allocation", "MemoryError", "ENOMEM",
		"cannot allocate memory", "unable to allocate", "out of memory"}},
	{OutputLimit, []string{"EFBIG", "file too large", "ENOSPC", "no space left on device", "EDQUOT",
		"disk quota exceeded", "EMFILE", "too many open files"}},
}

// limitInOutput returns the limit that a program's message reports as reached, "" if none.
func limitInOutput(words string) Reason {
	words = strings.ToLower(words)
	for _, one := range limitMessages {
		for _, said := range one.words {
			if strings.Contains(words, strings.ToLower(said)) {
				return one.reason
			}
		}
	}
	return ""
}

// lastPart returns the end of a text as valid UTF-8, because the cause is usually at the end.
func lastPart(text string) string {
	text = strings.TrimSpace(text)
	if len(text) > maxLastWords {
		text = "[...]" + text[len(text)-maxLastWords:]
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

// ToError returns the error of a request, as formatted: text, class, facts and hint.
func (f *Failure) ToError(cause error, format string, args ...any) *apierr.Error {
	e := apierr.New(cmp.Or(meanings[f.Reason].class, apierr.CompileFailed), nil, format, args...)
	e.Text += ": " + f.Text
	e.Err = &failed{f, cause}
	for key, value := range f.Facts {
		e.WithFact(key, value)
	}
	e.Hint = f.Advice()
	return e
}

// failed wraps a Failure as the cause of an apierr.Error.
type failed struct {
	*Failure       // shared: read only
	cause    error // may be nil
}

func (f *failed) Error() string { return f.Text }

func (f *failed) Unwrap() error { return f.cause }

// FromError returns the compile's failure that an error wraps, nil for other errors.
func FromError(err error) *Failure {
	var e *apierr.Error
	if !errors.As(err, &e) {
		return nil
	}
	// Only the direct cause counts, because an error that is wrapped deeper is not the reported
	// one.
	if f, ok := e.Err.(*failed); ok {
		return f.Failure
	}
	return nil
}

// AddHint adds a hint to those that the failure has already.
func (f *Failure) AddHint(hint string) {
	if f.Hint != "" {
		f.Hint += "; or "
	}
	f.Hint += hint
}

// Advice returns all hints: those of the failure, and that of its reason.
func (f *Failure) Advice() string {
	usual := meanings[f.Reason].hint
	if f.Hint == "" || usual == "" {
		return f.Hint + usual
	}
	return f.Hint + "; or " + usual
}

// meanings has the properties of reasons that differ from the defaults.
var meanings = map[Reason]struct {
	hint       string
	class      apierr.Class // 0: CompileFailed
	notOfModel bool
	ofProvider bool
}{
	"":          {notOfModel: true},
	Cancelled:   {class: apierr.Cancelled, notOfModel: true},
	NoWorker:    {hint: hintMachine, class: apierr.Unavailable, notOfModel: true},
	Sandbox:     {hint: hintMachine, class: apierr.Unavailable, notOfModel: true},
	Crash:       {hint: hintCrash, ofProvider: true},
	NoNode:      {hint: hintNoNode, ofProvider: true},
	Refused:     {ofProvider: true},
	Invalid:     {ofProvider: true},
	LoadCheck:   {ofProvider: true},
	Timeout:     {hint: hintLimits},
	CPU:         {hint: hintLimits},
	Memory:      {hint: hintLimits},
	OutputLimit: {hint: hintLimits},
}

const (
	hintNoNode = "use the model as it is: load it without epcached, " +
		"or choose another execution provider"
	hintCrash = "the daemon is not affected, but an application that loads the model with this " +
		"execution provider may crash too: choose another provider or other options"
	hintLimits  = "[limits] in the daemon's configuration sets the bounds of a compile"
	hintMachine = "the fault may be the machine's and not the model's; epcachectl doctor looks " +
		"for it"
)

// BlamesModel reports whether the model may be the cause, and not the machine or the request.
func (r Reason) BlamesModel() bool { return !meanings[r].notOfModel }

// BlamesProvider reports whether the execution provider would fail in any process, so that an
// application need not try to compile itself. Limits do not count, because they are the daemon's.
func (r Reason) BlamesProvider() bool { return meanings[r].ofProvider }

// OfLoad returns the failure of a model that compiles but does not load.
func OfLoad(checked compilers.CheckResult) *Failure {
	f := &Failure{Reason: LoadCheck, Text: lastPart("the compiled model does not load: " +
		"" + checked.Cause()),
		Facts: map[string]string{"reason": string(LoadCheck), "code": fmt.Sprint(checked.Code)}}
	if checked.Signal != "" {
		f.Facts["signal"] = checked.Signal
	}
	f.nameRuntime(checked.Text)
	return f
}

// OfOutput returns the failure of a compile that wrote no valid artefact.
func OfOutput(err error) *Failure {
	return &Failure{Reason: Invalid, Text: lastPart("the execution provider's output is not a " +
		"valid compiled model: " + err.Error()),
		Facts: map[string]string{"reason": string(Invalid)}}
}

// OfInterface returns the failure of a compiled model that cannot stand for its source, although it
// may load.
func OfInterface(err error) *Failure {
	return &Failure{Reason: Invalid, Text: lastPart(err.Error()), Hint: "use the model as it is: " +
		"load it without epcached", Facts: map[string]string{"reason": string(Invalid)}}
}

// OfMachine returns a failure that the machine causes and not the model.
func OfMachine(text string) *Failure {
	return &Failure{Reason: Sandbox, Text: lastPart(text),
		Facts: map[string]string{"reason": string(Sandbox)}}
}

// ModelPlaceholder replaces, in a failure's text, the path of the model that the compiler printed.
// ForName replaces it by each user's own name.
const ModelPlaceholder = "\uFFFC"

// CompilerWordFacts are the facts with the compiler's output, which may name the model.
var CompilerWordFacts = []string{"stderr", "logged"}

// ForName returns the failure in the words for a user that gives the model this name.
func (f *Failure) ForName(name string) *Failure {
	out := *f
	out.ModelName = name
	out.Text = strings.ReplaceAll(f.Text, ModelPlaceholder, name)
	out.Facts = maps.Clone(f.Facts)
	for _, fact := range CompilerWordFacts {
		if words := f.Facts[fact]; words != "" {
			out.Facts[fact] = strings.ReplaceAll(words, ModelPlaceholder, name)
		}
	}
	return &out
}

// RenamedError returns the error of a failed job with the name that this user gives the model,
// because another user may have begun the job.
func RenamedError(e *apierr.Error, name string) *apierr.Error {
	f, ok := e.Err.(*failed)
	if !ok || name == f.ModelName {
		return e
	}
	head, ok := strings.CutSuffix(e.Text, f.ForName(f.ModelName).Text)
	if !ok {
		return e
	}
	own, renamed := *e, f.ForName(name)
	own.Err = &failed{renamed, f.cause}
	own.Text = strings.Replace(head, strconv.Quote(f.ModelName), strconv.Quote(name), 1) +
		renamed.Text
	own.Facts = maps.Clone(e.Facts)
	maps.Copy(own.Facts, renamed.Facts)
	return &own
}

// MissError returns the error of a request that wants no compile, for a model with a remembered
// failure.
func (f *Failure) MissError(model string) *apierr.Error {
	e := f.RememberedError(model)
	e.Class, e.Text = apierr.NotFound,
		fmt.Sprintf("no build for model %q, which does not compile (%s): %s", model,
			f.history(), f.Text)
	return e
}

// RememberedError returns the error of a request that the negative cache answers.
func (f *Failure) RememberedError(model string) *apierr.Error {
	e := f.ToError(nil, "model %q does not compile (%s)", model, f.history())
	e.WithFact("request_key", f.RequestKey.String()).WithFact("failed", fmt.Sprint(f.Count)).
		WithFact("last_at", f.Last.UTC().Format(time.RFC3339)).
		WithFact("retry_at", f.Retry.UTC().Format(time.RFC3339))
	retry := "to retry now: epcachectl jobs retry " + f.RequestKey.String()[:16]
	if e.Hint != "" {
		retry = e.Hint + "; " + retry
	}
	return e.WithHint("%s", retry)
}

func (f *Failure) history() string {
	times := "failed once"
	if f.Count > 1 {
		times = fmt.Sprintf("failed %d times", f.Count)
	}
	return fmt.Sprintf("%s, last at %s, not retried before "+
		"%s", times, f.Last.UTC().Format(time.RFC3339), f.Retry.UTC().Format(time.RFC3339))
}

// Means reports whether a user's name for a model or a key selects the failure.
func (f *Failure) Means(name string) bool {
	ids := []string{f.RequestKey.String(), f.BuildKey.String(), f.ModelDigest.String()}
	return modelname.Matches(f.ModelName, name) || len(name) >= index.MinPrefix &&
		slices.ContainsFunc(ids, func(id string) bool { return strings.HasPrefix(id, name) })
}

// Line describes the failure in one line.
func (f *Failure) Line() string {
	return fmt.Sprintf("it does not compile (%s): %s", f.history(), f.Text)
}
